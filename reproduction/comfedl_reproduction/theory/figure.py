"""The figure of the convergence analysis: measurements and the paper's bounds."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from comfedl_reproduction.theory.measure import DRIFT_BATCH, LAWS, LONG, Row
from comfedl_reproduction.theory.problem import Synthetic
from comfedl_reproduction.theory.robust import ESTIMATES, GAMMA
from comfedl_reproduction.theory.summary import SeriesPoint, group_by, power_law, series_points

# The palette of Okabe and Ito, safe for the colour-blind; markers differ too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
HALF = "second half of the rounds"

Series = dict[tuple[str, str, str], list[SeriesPoint]]


def draw(rows: Sequence[Row]) -> bytes:
    """Panels as a PNG: the rate over T, drift and error over tau eta, errors and bias over b, estimates over T."""
    panels = [_rate, _drift, _bias]
    if any(row["part"] == "estimate" for row in rows):
        panels.append(_estimates)
    figure = Figure(figsize=(4.5 * len(panels), 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    series: Series = {
        (p, s, q): series_points(same) for (p, s, q), same in group_by(rows, "part", "series", "quantity").items()
    }
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        panel(axes, series)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _points(
    axes: Axes,
    at: Sequence[SeriesPoint],
    k: int,
    label: str = "",
    line: str = "-",
    mark: str = "",
    hollow: bool = False,
) -> None:
    """Means with standard errors; values of 0 or less are left out, since the axis is logarithmic."""
    at = [point for point in at if point.mean > 0]
    error = np.asarray([point.error for point in at])
    axes.errorbar(
        [point.x for point in at],
        [point.mean for point in at],
        [np.minimum(error, [0.999 * point.mean for point in at]), error],
        color=COLOURS[k],
        marker=mark or MARKERS[k],
        markerfacecolor="none" if hollow else COLOURS[k],
        markersize=8 if hollow else 4.5,
        linestyle=line,
        linewidth=1,
        capsize=3,
        label=label or "_",
    )


def _bound(axes: Axes, at: Sequence[SeriesPoint], k: int, label: str) -> None:
    bounds = sorted({point.x: point.bound for point in at if point.bound is not None}.items())
    axes.plot(*zip(*bounds, strict=True), color=COLOURS[k], linestyle="--", label=label)


def _slope(at: Sequence[SeriesPoint]) -> str:
    slope, _ = power_law((point.x for point in at), (point.mean for point in at))
    return f"slope {slope:.2f}"


def _rate(axes: Axes, series: Series) -> None:
    for k, law in enumerate(LAWS):
        at, name = series["rate", law, "all rounds"], law.replace("sqrt(T)", r"$\sqrt{T}$")
        _points(axes, at, k, f"{name}: {_slope(at)}")
        if law in LONG:
            _points(axes, series["rate", law, HALF], k, f"{name}, second half of the rounds", ":", hollow=True)
            _bound(axes, at, k, f"{name}: the theorem's bound")
    axes.axhline(Synthetic().gradient_bound() ** 2, color="0.6", linewidth=1, label=r"upper bound of $\|\nabla F\|^2$")
    axes.set_xlabel(r"local steps $T = \tau S$")
    axes.set_ylabel(r"mean over rounds of $\|\nabla F(\bar{w}_s)\|^2$")
    axes.set_title(r"The theorem: $\eta = 1/\sqrt{T}$, $\tau = 4$")


def _drift(axes: Axes, series: Series) -> None:
    drift, error = series["drift", "", "drift of the average"], series["drift", "", "error of the direction"]
    taus = sorted({point.tau for point in drift if point.tau})
    for k, at in enumerate((drift, error)):
        for j, tau in enumerate(taus):
            _points(axes, [point for point in at if point.tau == tau], k, line="none", mark=MARKERS[j])
    _bound(axes, drift, 0, "Lemma 2's bound")
    _bound(axes, error, 1, "Lemma 3's bound")
    axes.plot([], [], color=COLOURS[0], linewidth=5, label=r"drift $\|\bar{w}_{s,t} - \bar{w}_s\|^2$")
    axes.plot([], [], color=COLOURS[1], linewidth=5, label=r"error $\|\bar{u}_{s,t} - U_{s,0}\|^2$")
    for j, tau in enumerate(taus):
        axes.plot([], [], color="0.4", marker=MARKERS[j], markersize=4.5, linestyle="none", label=rf"$\tau = {tau}$")
    axes.set_xlabel(r"$\tau\eta$")
    axes.set_ylabel("squared distance, at the worst local step")
    axes.set_title(f"Within a round: b = {DRIFT_BATCH}")


def _bias(axes: Axes, series: Series) -> None:
    labels = {
        "inner value rms": "$f_B$, root mean square error",
        "direction rms": "$u$, root mean square error",
        "direction bias": "$u$, bias",
    }
    for k, (quantity, label) in enumerate(labels.items()):
        at = series["bias", "", quantity]
        _points(axes, at, k, f"{label}: {_slope(at)}", hollow=k == 0)
        if any(point.bound is not None for point in at):
            _bound(axes, at, k, f"{label}: its bound")
    limit = series["bias", "", "direction bias (Taylor)"]
    axes.plot([at.x for at in limit], [at.mean for at in limit], color="black", linewidth=1, label="$u$, bias: $c / b$")
    axes.set_xlabel("batch size $b = b_1$")
    axes.set_ylabel("norm of the error at one model")
    axes.set_title("A client's estimate of its gradient")


def _estimates(axes: Axes, series: Series) -> None:
    for k, estimate in enumerate(ESTIMATES):
        at = series.get(("estimate", estimate, "last quarter"), [])
        _points(axes, at, k, estimate)
    axes.set_xlabel(r"local steps $T = \tau S$")
    axes.set_ylabel(r"mean of $\|\nabla F(\bar{w}_s)\|^2$ over the last quarter")
    axes.set_title(rf"Eq. (5), $\gamma = {GAMMA}$: how losses are estimated")
