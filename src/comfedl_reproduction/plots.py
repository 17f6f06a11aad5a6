"""The figures as pictures: curves over rounds or iterations with bands over seeds, in colours that anybody can tell."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from comfedl.utils.errors import ConfigError
from comfedl_reproduction.protocol import Curve, Outcome, standard_error

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from PIL import Image
except ImportError:
    raise ConfigError("The figures need matplotlib, which is not installed: pip install 'comfedl[plot]'.") from None

# Okabe and Ito's palette; a line's style tells it apart in grey too.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
METHODS = {
    "ComFedL": 0,
    "ComFedL-DAMAML": 0,
    "ComFedL-DAMAML, exact": 5,
    "FedAvg": 1,
    "FedAvg, one step at test": 1,
    "DRFL": 2,
    "TR-MAML": 2,
    "q-FedAvg": 3,
    "FedMAML": 3,
    "Ditto": 4,
}
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), "-")
SYMBOLS = {"tau": r"$\tau$", "gamma": r"$\gamma$", "rho": r"$\rho$"}
AXES = {"round": "communication rounds", "iterations": "local iterations (rounds x local steps)"}


@dataclass(frozen=True)
class Panel:
    """What one set of axes shows: a group's arms, one column of the rows, over "round", "iterations" or "point"."""

    group: str
    column: str
    x: str = "iterations"


Grid = list[list[Panel]]


def _rows(groups: Sequence[tuple[str, str]], columns: Sequence[str]) -> Grid:
    return [[Panel(group, column, x) for column in columns] for group, x in groups]


def _robust(group: str) -> Grid:
    """As figure 2 of the paper, and test beside it: average accuracy above, the worst client's below."""
    splits = ("train", "validation", "test")
    return [[Panel(group, f"{split}.accuracy.{kind}", "round") for split in splits] for kind in ("mean", "worst")]


def _sweeps(split: str) -> Grid:
    columns = ["train.accuracy.mean", "validation.accuracy.mean", "validation.accuracy.worst", "test.accuracy.worst"]
    groups = [(f"tau-{split}", "round"), (f"tau-{split}", "iterations"), (f"gamma-{split}", "iterations")]
    return _rows(groups, columns)


PERSONAL = ["validation.personal_loss.mean", "validation.personal_accuracy.mean", "test.personal_accuracy.mean"]
WORST = ["validation.personal_loss.worst", "validation.personal_accuracy.worst", "test.personal_accuracy.worst"]
PICTURES: dict[str, dict[str, Grid]] = {
    "fig2": {group: _robust(group) for group in ("published", "independent", "skewed")},
    "fig3": {split: _sweeps(split) for split in ("independent", "skewed")},
    "fig4": {"": _rows([("main", "round")], PERSONAL) + _rows([("main", "round")], WORST)},
    "fig5": {"": _rows([("tau", "round"), ("tau", "iterations"), ("gamma", "iterations")], PERSONAL)},
    "fig6": {"": _rows([("rho", "point"), ("rho", "round")], PERSONAL) + _rows([("rho", "point")], WORST)},
}


def pictures(outcome: Outcome) -> dict[str, bytes]:
    """File name -> PNG of everything that a figure draws."""
    name = outcome.figure.name
    grids = {key: _present(grid, outcome) for key, grid in PICTURES[name].items()}
    return {f"{name}{'-' if key else ''}{key}.png": _draw(outcome, grid) for key, grid in grids.items() if grid}


def _present(grid: Grid, outcome: Outcome) -> Grid:
    """A preset may leave groups out."""
    return [row for row in grid if row[0].group in outcome.figure.groups]


def _draw(outcome: Outcome, grid: Grid) -> bytes:
    rows, columns = len(grid), len(grid[0])
    canvas = Canvas(figsize=(3.3 * columns, 2.55 * rows + 0.9), layout="constrained")
    table = canvas.subplots(rows, columns, squeeze=False)
    for panels, axes_row in zip(grid, table, strict=True):
        for panel, axes in zip(panels, axes_row, strict=True):
            _panel(axes, panel, [curve for curve in outcome.curves if curve.arm.group == panel.group])
        axes_row[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
        axes_row[0].set_title(outcome.figure.groups[panels[0].group], fontsize=9, loc="left")
    canvas.suptitle(outcome.figure.title, fontsize=11)
    canvas.supxlabel(_caption(outcome), fontsize=7.5, color="0.3")
    drawn, small = io.BytesIO(), io.BytesIO()
    canvas.savefig(drawn, dpi=110, format="png")
    # 96 colours are enough for lines and bands, and a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def _caption(outcome: Outcome) -> str:
    figure = outcome.figure
    seeds = f"mean of {figure.seeds} seeds; band: plus and minus one standard error"
    return f"{figure.name}, preset {figure.preset}, data {figure.data}: " + (seeds if figure.seeds > 1 else "one seed")


def _panel(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    if panel.x == "point":
        _over_points(axes, panel, curves)
    else:
        for i, curve in enumerate(curves):
            _line(axes, panel, curve, i, curves)
    split, metric, kind = panel.column.split(".")
    word = metric.removeprefix("personal_")
    unit = "share of samples" if word == "accuracy" else "nats"
    who = "worst client" if kind == "worst" else "average client"
    axes.set_ylabel(f"{split} {word}, {who}\n({unit})", fontsize=8)
    axes.set_xlabel(AXES.get(panel.x, r"heterogeneity $\rho$ (share of the dominant class)"), fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, panel: Panel, curve: Curve, i: int, curves: Sequence[Curve]) -> None:
    """A curve with its band; one that diverged is only named, with the round."""
    whole = [record for record in curve.records if record["diverged"] is None]
    style = _style(curve, i, curves)
    if not whole:
        first = min(record["diverged"]["round"] for record in curve.records)
        axes.plot([], [], label=f"{_label(curve, curves)}\n(diverged in round {first})", **{**style, "color": "0.5"})
        return
    gap = whole[0]["settings"]["algorithm"]["local_steps"]
    x = [row["round"] * (gap if panel.x == "iterations" else 1) for row in whole[0]["rounds"]]
    values = list(zip(*([row[panel.column] for row in record["rounds"]] for record in whole), strict=True))
    mean, error = [fmean(each) for each in values], [standard_error(each) for each in values]
    axes.plot(x, mean, label=_label(curve, curves), linewidth=1.5, **style)
    low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _over_points(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    """The last round's number against the value that a sweep is over, a line a method."""
    for label in dict.fromkeys(curve.arm.label for curve in curves):
        x, mean, error = [], [], []
        for curve in curves:
            values = [r["rounds"][-1][panel.column] for r in curve.records if r["diverged"] is None]
            if curve.arm.label == label and values:
                x.append(float(curve.arm.point or "nan"))
                mean.append(fmean(values))
                error.append(standard_error(values))
        style: dict[str, Any] = {"color": COLOURS[METHODS[label]], "linestyle": STYLES[METHODS[label]]}
        axes.errorbar(x, mean, error, label=label, marker="o", markersize=4, capsize=3, linewidth=1.5, **style)


def _style(curve: Curve, i: int, curves: Sequence[Curve]) -> dict[str, Any]:
    """A colour a method; in a sweep a colour a point, and with several methods a line style a method."""
    labels = list(dict.fromkeys(one.arm.label for one in curves))
    if curve.arm.point is None:
        number = METHODS.get(curve.arm.label, len(COLOURS) - 1)
        return {"color": COLOURS[number], "linestyle": STYLES[number]}
    points = list(dict.fromkeys(one.arm.point for one in curves))
    place = points.index(curve.arm.point)
    return {
        "color": COLOURS[place],
        "linestyle": STYLES[labels.index(curve.arm.label) if len(labels) > 1 else place],
    }


def _label(curve: Curve, curves: Sequence[Curve]) -> str:
    if curve.arm.point is None:
        return curve.arm.label
    symbol = SYMBOLS[curve.arm.group.partition("-")[0]]
    alone = len({one.arm.label for one in curves}) == 1
    return f"{symbol} = {curve.arm.point}" + ("" if alone else f", {curve.arm.label.partition(',')[0]}")
