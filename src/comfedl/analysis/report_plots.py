"""The report's plots as PNGs for a paper, drawn by matplotlib from the same contents as the page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from comfedl.utils.errors import ConfigError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise ConfigError("PNG plots need matplotlib, which is not installed: pip install 'comfedl[plot]'.") from None

# Okabe and Ito's palette, as on the page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B3528E", "#B07A00", "#3F8FC4", "#6B5B95", "#555B61")
WIDTH, HEIGHT = 4.2, 3.1  # inches per panel


def draw_plots(shown: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG: curves, clients over rounds, clients at the end, and weights."""
    drawn = {"curves.png": _curves(shown), "clients.png": _clients(shown), "final.png": _final(shown)}
    if any(clients["weights"] for clients in _first_seeds(shown)):
        drawn["weights.png"] = _weights(shown)
    return drawn


def _colour(method: int) -> str:
    return COLOURS[method % len(COLOURS)]


def _escaped(name: str) -> str:
    return name.replace("$", r"\$")  # matplotlib reads $...$ as math


def _first_seeds(shown: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The clients of each method's first seed."""
    first: dict[int, Mapping[str, Any]] = {}
    for clients in shown["clients"]:
        first.setdefault(clients["method"], clients)
    return list(first.values())


def _title(shown: Mapping[str, Any], clients: Mapping[str, Any]) -> str:
    """The method, and of several seeds the one that is shown."""
    method = shown["methods"][clients["method"]]
    return _escaped(method["name"]) + (f", seed {clients['seed']}" if len(method["seeds"]) > 1 else "")


def _array(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _panels(rows: int, columns: int, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH * columns, height * rows), layout="constrained", dpi=200)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})  # no version: equal contents give equal bytes
    return file.getvalue()


def _curves(shown: Mapping[str, Any]) -> bytes:
    figure, axes = _panels(len(shown["metrics"]), 2)
    panels = [(metric, statistic) for metric in shown["metrics"] for statistic in ("mean", "worst")]
    for ax, (metric, statistic) in zip(axes, panels, strict=True):
        for i, method in enumerate(shown["methods"]):
            curve = method["curves"].get(f"{shown['split']}.{metric}.{statistic}")
            if curve is None:
                continue
            rounds, mean, low, high = (_array(curve[key]) for key in ("rounds", "mean", "low", "high"))
            if len(method["seeds"]) > 1:
                ax.fill_between(rounds, low, high, color=_colour(i), alpha=0.18, lw=0)
            marker = "o" if len(rounds) == 1 else ""
            ax.plot(rounds, mean, marker + "-", color=_colour(i), label=_escaped(method["name"]))
        ax.set_xlabel("round")
        ax.set_ylabel(f"{shown['split']} {_escaped(metric)}, {'average' if statistic == 'mean' else 'worst'} client")
        ax.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize="small")
    return _png(figure)


def _clients(shown: Mapping[str, Any]) -> bytes:
    panels = _first_seeds(shown)
    figure, axes = _panels(1, len(panels))
    sign = -1 if shown["metric"] in shown["smaller"] else 1
    for i, (ax, clients) in enumerate(zip(axes, panels, strict=True)):
        key = f"{shown['split']}.{shown['metric']}"
        lines, ends = _array(clients["values"].get(key, [])), _array(clients["ends"].get(key, []))
        colour = _colour(clients["method"])
        if lines.size:
            worst = int(np.argmin(np.nan_to_num(sign * ends, nan=np.inf)))
            for k, line in enumerate(lines):
                strong = k == worst
                ax.plot(clients["rounds"], line, color=colour, lw=2 if strong else 0.8, alpha=1 if strong else 0.35)
            name, end = _escaped(clients["names"][worst]), (clients["rounds"][-1], lines[worst, -1])
            ax.annotate(name, end, (0, -4), textcoords="offset points", ha="right", va="top")
        ax.set_title(_title(shown, clients), loc="left", fontsize="medium")
        ax.set_xlabel("round")
        if i:
            ax.sharey(axes[0])
        else:
            ax.set_ylabel(f"{shown['split']} {_escaped(shown['metric'])} per client")
    return _png(figure)


def _final(shown: Mapping[str, Any]) -> bytes:
    rows = len(shown["methods"])
    figure, (ax,) = _panels(1, 1, 0.7 * rows + 0.9)
    for clients in shown["clients"]:
        ends = _array(clients["ends"].get(f"{shown['split']}.{shown['metric']}", []))
        if ends.size:
            jitter = ((np.arange(len(ends)) * 0.618 + clients["seed"] * 0.37) % 1 - 0.5) * 0.5
            y = rows - 1 - clients["method"] + jitter
            ax.plot(ends, y, "o", ms=4, alpha=0.55, mew=0, color=_colour(clients["method"]))
    ax.set_yticks(range(rows), [_escaped(method["name"]) for method in reversed(shown["methods"])])
    ax.set_ylim(-0.6, rows - 0.4)
    ax.set_xlabel(f"final {shown['split']} {_escaped(shown['metric'])} per client")
    ax.grid(axis="x", alpha=0.25)
    return _png(figure)


def _weights(shown: Mapping[str, Any]) -> bytes:
    panels = [clients for clients in _first_seeds(shown) if clients["weights"]]
    height = 0.16 * max(len(clients["names"]) for clients in panels) + 1
    figure, axes = _panels(1, len(panels), min(9.0, max(HEIGHT, height)))
    top = max(float(np.nanmax(_array(clients["weights"]))) for clients in panels)
    for ax, clients in zip(axes, panels, strict=True):
        image = ax.imshow(_array(clients["weights"]), aspect="auto", cmap="Blues", vmin=0, vmax=top or 1)
        y_step, x_step = -(-len(clients["names"]) // 40), -(-len(clients["rounds"]) // 6)
        names = [_escaped(name)[:20] for name in clients["names"]]
        ax.set_yticks(range(0, len(names), y_step), names[::y_step], fontsize="x-small")
        ax.set_xticks(range(0, len(clients["rounds"]), x_step), clients["rounds"][::x_step])
        ax.set_xlabel("round")
        ax.set_title(_title(shown, clients), loc="left", fontsize="medium")
    figure.colorbar(image, ax=axes, label="weight r per client", fraction=0.05)
    return _png(figure)
