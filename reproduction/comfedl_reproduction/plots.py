"""The plots: curves over rounds or iterations with error bands over seeds, in colours safe for the colour-blind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from comfedl.analysis.stats import standard_error
from comfedl.utils.errors import ConfigError
from comfedl_reproduction.protocol import Curve, FigureOutcome

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from PIL import Image
except ImportError:
    raise ConfigError("The figures need matplotlib, which is not installed: pip install 'comfedl[plot]'.") from None

# The palette of Okabe and Ito; line styles differ too, for print in grey.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
METHODS = {
    "ComFedL": 0,
    "ComFedL-DAMAML": 0,
    "FedAvg": 1,
    "FedAvg, one step at test": 1,
    "DRFL": 2,
    "TR-MAML": 2,
    "q-FedAvg": 3,
    "FedMAML": 3,
    "Ditto": 4,
    "ComFedL, literal, gamma 1": 4,
    "ComFedL, literal, gamma 5": 5,
    "Safe step, momentum": 4,
    "Robust": 6,
    "FedAvg, Robust's optimiser": 5,
    "Equal weights, Robust's optimiser": 2,
    "Robust, adapted": 6,
    "FedMAML, Robust's optimiser": 5,
}
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), "-")
SYMBOLS = {"tau": r"$\tau$", "gamma": r"$\gamma$", "rho": r"$\rho$"}
AXES = {"round": "communication rounds", "iterations": "local iterations (rounds x local steps)"}


@dataclass(frozen=True)
class Panel:
    """One set of axes: a column of curves.csv for the arms of a group, over "round", "iterations" or "point".

    ``methods`` are the labels to show; none means all.
    """

    group: str
    column: str
    x: str = "iterations"
    methods: tuple[str, ...] = ()

    def chosen(self, curves: Sequence[Curve]) -> list[Curve]:
        """The curves to show."""
        own = [curve for curve in curves if curve.arm.group == self.group]
        return [curve for curve in own if not self.methods or curve.arm.label in self.methods]


Grid = list[list[Panel]]


def _rows(groups: Sequence[tuple[str, str]], columns: Sequence[str]) -> Grid:
    return [[Panel(group, column, x) for column in columns] for group, x in groups]


PUBLISHED = ("ComFedL", "DRFL", "q-FedAvg", "FedAvg", "ComFedL, literal, gamma 1", "ComFedL, literal, gamma 5")
OPTIMISERS = (
    "ComFedL",
    "FedAvg",
    "Safe step, momentum",
    "Robust",
    "FedAvg, Robust's optimiser",
    "Equal weights, Robust's optimiser",
)


def _fig2(group: str, methods: tuple[str, ...] = ()) -> Grid:
    """As figure 2 of the paper, plus test data: average accuracy above, the worst client's below."""
    splits = ("train", "validation", "test")
    return [
        [Panel(group, f"{split}.accuracy.{kind}", "round", methods) for split in splits] for kind in ("mean", "worst")
    ]


def _fig3(split: str) -> Grid:
    columns = ["train.accuracy.mean", "validation.accuracy.mean", "validation.accuracy.worst", "test.accuracy.worst"]
    groups = [(f"tau-{split}", "round"), (f"tau-{split}", "iterations"), (f"gamma-{split}", "iterations")]
    return _rows(groups, columns)


PERSONAL = ["validation.personal_loss.mean", "validation.personal_accuracy.mean", "test.personal_accuracy.mean"]
WORST = ["validation.personal_loss.worst", "validation.personal_accuracy.worst", "test.personal_accuracy.worst"]
PLOTS: dict[str, dict[str, Grid]] = {
    "fig2": {
        "published": _fig2("published"),
        **{group: _fig2(group, PUBLISHED) for group in ("independent", "skewed")},
        **{f"{group}-optimisers": _fig2(group, OPTIMISERS) for group in ("independent", "skewed")},
    },
    "fig3": {split: _fig3(split) for split in ("independent", "skewed", "independent-robust", "skewed-robust")},
    "fig4": {"": _rows([("main", "round")], PERSONAL) + _rows([("main", "round")], WORST)},
    "fig5": {"": _rows([("tau", "round"), ("tau", "iterations"), ("gamma", "iterations")], PERSONAL)},
    "fig6": {"": _rows([("rho", "point"), ("rho", "round")], PERSONAL) + _rows([("rho", "point")], WORST)},
}


def plots(outcome: FigureOutcome) -> dict[str, bytes]:
    """All plots of a figure as PNG, by file name; groups that the preset skips are left out."""
    name, groups = outcome.figure.name, outcome.figure.groups
    grids = {key: [row for row in grid if row[0].group in groups] for key, grid in PLOTS[name].items()}
    grids = {key: grid for key, grid in grids.items() if any(p.chosen(outcome.curves) for row in grid for p in row)}
    return {f"{name}{'-' if key else ''}{key}.png": _draw(outcome, grid) for key, grid in grids.items() if grid}


def _draw(outcome: FigureOutcome, grid: Grid) -> bytes:
    rows, columns = len(grid), len(grid[0])
    canvas = Canvas(figsize=(3.3 * columns, 2.55 * rows + 0.9), layout="constrained")
    table = canvas.subplots(rows, columns, squeeze=False)
    for panels, axes_row in zip(grid, table, strict=True):
        for panel, axes in zip(panels, axes_row, strict=True):
            _panel(axes, panel, panel.chosen(outcome.curves))
        axes_row[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
        axes_row[0].set_title(outcome.figure.groups[panels[0].group], fontsize=9, loc="left")
    canvas.suptitle(outcome.figure.title, fontsize=11)
    canvas.supxlabel(_caption(outcome), fontsize=7.5, color="0.3")
    drawn, small = io.BytesIO(), io.BytesIO()
    canvas.savefig(drawn, dpi=110, format="png")
    # 96 colours are enough for lines and bands, and take a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def _caption(outcome: FigureOutcome) -> str:
    figure = outcome.figure
    seeds = f"mean of {figure.seeds} seeds; band: plus and minus one standard error"
    return f"{figure.name}, preset {figure.preset}, data {figure.data}: " + (seeds if figure.seeds > 1 else "one seed")


def _panel(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    if panel.x == "point":
        _over_points(axes, panel, curves)
    else:
        for curve in curves:
            _line(axes, panel, curve, curves)
    split, metric, kind = panel.column.split(".")
    word = metric.removeprefix("personal_")
    unit = "fraction of samples" if word == "accuracy" else "nats"
    who = "worst client" if kind == "worst" else "average client"
    axes.set_ylabel(f"{split} {word}, {who}\n({unit})", fontsize=8)
    axes.set_xlabel(AXES.get(panel.x, r"heterogeneity $\rho$ (fraction of the dominant class)"), fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, panel: Panel, curve: Curve, curves: Sequence[Curve]) -> None:
    """A curve with its error band; a diverged one appears only in the legend, with the round."""
    completed = [record for record in curve.records if record["diverged"] is None]
    style = _style(curve, curves)
    if not completed:
        first = min(record["diverged"]["round"] for record in curve.records)
        axes.plot([], [], label=f"{_label(curve, curves)}\n(diverged in round {first})", **{**style, "color": "0.5"})
        return
    local_steps = completed[0]["settings"]["algorithm"]["local_steps"]
    x = [row["round"] * (local_steps if panel.x == "iterations" else 1) for row in completed[0]["rounds"]]
    values = list(zip(*([row[panel.column] for row in record["rounds"]] for record in completed), strict=True))
    mean, error = [fmean(each) for each in values], [standard_error(each, single=0.0) for each in values]
    axes.plot(x, mean, label=_label(curve, curves), linewidth=1.5, **style)
    low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _over_points(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    """The last round's value over the points of the sweep, one line per method."""
    for label in dict.fromkeys(curve.arm.label for curve in curves):
        x, mean, error = [], [], []
        for curve in curves:
            values = [r["rounds"][-1][panel.column] for r in curve.records if r["diverged"] is None]
            if curve.arm.label == label and values:
                x.append(float(curve.arm.point or "nan"))
                mean.append(fmean(values))
                error.append(standard_error(values, single=0.0))
        style: dict[str, Any] = {"color": COLOURS[METHODS[label]], "linestyle": STYLES[METHODS[label]]}
        axes.errorbar(x, mean, error, label=label, marker="o", markersize=4, capsize=3, linewidth=1.5, **style)


def _style(curve: Curve, curves: Sequence[Curve]) -> dict[str, Any]:
    """One colour per method; in a sweep one colour per point, and one line style per method if there are several."""
    labels = list(dict.fromkeys(one.arm.label for one in curves))
    if curve.arm.point is None:
        number = METHODS.get(curve.arm.label, len(COLOURS) - 1)
        return {"color": COLOURS[number], "linestyle": STYLES[number]}
    index = list(dict.fromkeys(one.arm.point for one in curves)).index(curve.arm.point)
    style = STYLES[labels.index(curve.arm.label) if len(labels) > 1 else index]
    return {"color": COLOURS[index], "linestyle": style}


def _label(curve: Curve, curves: Sequence[Curve]) -> str:
    if curve.arm.point is None:
        return curve.arm.label
    symbol = SYMBOLS[curve.arm.group.partition("-")[0]]
    alone = len({one.arm.label for one in curves}) == 1
    return f"{symbol} = {curve.arm.point}" + ("" if alone else f", {curve.arm.label.partition(',')[0]}")
