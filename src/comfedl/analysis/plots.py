"""The report's plots as pictures for a paper: PNGs by matplotlib, from the same values as the page."""

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
    raise ConfigError("Pictures need matplotlib, which is not installed: pip install 'comfedl[plot]'.") from None

# Okabe and Ito's palette, as on the page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B3528E", "#B07A00", "#3F8FC4", "#6B5B95", "#555B61")
WIDTH, HEIGHT = 4.2, 3.1  # of a panel, in inches


def pictures(shown: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG: curves, clients, the last numbers of clients, and weights."""
    drawn = {"curves.png": _curves(shown), "clients.png": _clients(shown), "final.png": _final(shown)}
    if any(one["weights"] for one in _first(shown)):
        drawn["weights.png"] = _weights(shown)
    return drawn


def _colour(method: int) -> str:
    return COLOURS[method % len(COLOURS)]


def _text(name: str) -> str:
    return name.replace("$", r"\$")  # matplotlib would take it for mathematics


def _first(shown: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Each method's clients under its first seed."""
    found: dict[int, Mapping[str, Any]] = {}
    for one in shown["clients"]:
        found.setdefault(one["method"], one)
    return list(found.values())


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _panels(rows: int, columns: int, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH * columns, height * rows), layout="constrained", dpi=200)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})  # the same values give the same bytes
    return file.getvalue()


def _curves(shown: Mapping[str, Any]) -> bytes:
    figure, axes = _panels(len(shown["metrics"]), 2)
    panels = [(metric, kind) for metric in shown["metrics"] for kind in ("mean", "worst")]
    for one, (metric, kind) in zip(axes, panels, strict=True):
        for i, method in enumerate(shown["methods"]):
            found = method["curves"].get(f"{shown['split']}.{metric}.{kind}")
            if found is None:
                continue
            if len(method["seeds"]) > 1:
                one.fill_between(
                    found["rounds"], _numbers(found["low"]), _numbers(found["high"]), color=_colour(i), alpha=0.18, lw=0
                )
            mark = "o" if len(found["rounds"]) == 1 else ""
            one.plot(
                found["rounds"], _numbers(found["mean"]), mark + "-", color=_colour(i), label=_text(method["name"])
            )
        one.set_xlabel("round")
        one.set_ylabel(f"{shown['split']} {metric}, {'average' if kind == 'mean' else 'worst'} client")
        one.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize="small")
    return _png(figure)


def _clients(shown: Mapping[str, Any]) -> bytes:
    ones = _first(shown)
    figure, axes = _panels(1, len(ones))
    sign = -1 if shown["metric"] in shown["smaller"] else 1
    for place, (one, found) in enumerate(zip(axes, ones, strict=True)):
        lines = _numbers(found["values"].get(f"{shown['split']}.{shown['metric']}", []))
        colour = _colour(found["method"])
        if lines.size:
            worst = int(np.argmin(np.nan_to_num(sign * lines[:, -1], nan=np.inf)))
            for i, line in enumerate(lines):
                strong = i == worst
                one.plot(found["rounds"], line, color=colour, lw=2 if strong else 0.8, alpha=1 if strong else 0.35)
            name, end = _text(found["names"][worst]), (found["rounds"][-1], lines[worst, -1])
            one.annotate(name, end, (0, -4), textcoords="offset points", ha="right", va="top")
        one.set_title(_text(shown["methods"][found["method"]]["name"]), loc="left", fontsize="medium")
        one.set_xlabel("round")
        if place:
            one.sharey(axes[0])
        else:
            one.set_ylabel(f"{shown['split']} {shown['metric']} of each client")
    return _png(figure)


def _final(shown: Mapping[str, Any]) -> bytes:
    rows = len(shown["methods"])
    figure, (one,) = _panels(1, 1, 0.7 * rows + 0.9)
    for found in shown["clients"]:
        lines = _numbers(found["values"].get(f"{shown['split']}.{shown['metric']}", []))
        if lines.size:
            spread = ((np.arange(len(lines)) * 0.618 + found["seed"] * 0.37) % 1 - 0.5) * 0.5
            here = rows - 1 - found["method"]
            one.plot(lines[:, -1], here + spread, "o", ms=4, alpha=0.55, mew=0, color=_colour(found["method"]))
    one.set_yticks(range(rows), [_text(method["name"]) for method in reversed(shown["methods"])])
    one.set_ylim(-0.6, rows - 0.4)
    one.set_xlabel(f"{shown['split']} {shown['metric']} of each client at the end")
    one.grid(axis="x", alpha=0.25)
    return _png(figure)


def _weights(shown: Mapping[str, Any]) -> bytes:
    ones = [one for one in _first(shown) if one["weights"]]
    most = max(len(one["names"]) for one in ones)
    figure, axes = _panels(1, len(ones), min(9.0, max(HEIGHT, 0.16 * most + 1)))
    top = max(float(np.nanmax(_numbers(one["weights"]))) for one in ones)
    for one, found in zip(axes, ones, strict=True):
        image = one.imshow(_numbers(found["weights"]), aspect="auto", cmap="Blues", vmin=0, vmax=top or 1)
        step, jump = -(-len(found["names"]) // 40), -(-len(found["rounds"]) // 6)
        names = [_text(name)[:20] for name in found["names"]]
        one.set_yticks(range(0, len(names), step), names[::step], fontsize="x-small")
        one.set_xticks(range(0, len(found["rounds"]), jump), found["rounds"][::jump])
        one.set_xlabel("round")
        one.set_title(_text(shown["methods"][found["method"]]["name"]), loc="left", fontsize="medium")
    figure.colorbar(image, ax=axes, label="weight r of each client", fraction=0.05)
    return _png(figure)
