"""Summarises the measurements: fitted slopes next to the theory's, and bounds next to the values they bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from comfedl.analysis.stats import standard_error
from comfedl_reproduction.theory.measure import Row

# For larger tau * eta a model moves so far in a round that its drift need no longer be quadratic.
SMALL_STEP = 0.25
# Slopes by theory: from the bounds for the rate and the rms errors, from Taylor expansions for the others.
EXPECTED_SLOPES = {
    "all rounds": -0.5,
    "drift of the average": 2.0,
    "drift of the clients": 2.0,
    "inner value rms": -0.5,
    "direction rms": -0.5,
    "direction bias": -1.0,
}


class SeriesPoint(NamedTuple):
    """A point of a series: x, the mean over seeds with its standard error, and the bound."""

    x: float
    tau: int | None
    mean: float
    error: float
    bound: float | None


def power_law(x: Iterable[float], y: Iterable[float]) -> tuple[float, float]:
    """The least-squares slope of log y over log x and its standard error; NaN if there are too few points.

    >>> slope, error = power_law([1, 2, 4], [3, 12, 48])
    >>> round(slope, 9), round(error, 9)
    (2.0, 0.0)
    """
    u, v = np.log(np.asarray(list(x), dtype=float)), np.log(np.asarray(list(y), dtype=float))
    if len(u) == 0 or np.ptp(u) == 0:
        return math.nan, math.nan
    u, v = u - u.mean(), v - v.mean()
    slope = float(u @ v / (u @ u))
    residual = v - slope * u
    return slope, math.sqrt(float(residual @ residual / (u @ u)) / (len(u) - 2)) if len(u) > 2 else math.nan


def x_value(row: Row) -> float:
    """The x that a quantity is plotted and fitted against: T, tau * eta, tau or b."""
    if row["part"] == "drift":
        return float(row["tau"] * row["eta"])
    if row["part"] == "descent":
        return float(row["tau"])
    return float(row["T"] if "T" in row else row["b"])


def expected_slope(part: str, quantity: str) -> float:
    """The theory's slope; NaN where there is none: the theorem is not about the gradient of eq. (5)."""
    return math.nan if part == "estimate" else EXPECTED_SLOPES.get(quantity, math.nan)


def group_by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows grouped by their values in these columns."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def series_points(rows: Iterable[Row]) -> list[SeriesPoint]:
    """The means over seeds of one series, ordered by x."""
    found = []
    for same in group_by(rows, "T", "tau", "eta", "b").values():
        values, first = np.asarray([row["value"] for row in same]), same[0]
        error = standard_error(values, single=0.0)
        found.append(SeriesPoint(x_value(first), first.get("tau"), float(values.mean()), error, first["bound"]))
    return sorted(found, key=lambda point: (point.x, point.tau or 0))


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row per series. The slope is fitted to all seeds; ``last_slope`` is that between the last two points."""
    summary = []
    for (part, series, quantity), same in group_by(rows, "part", "series", "quantity").items():
        fitted = [row for row in same if row["value"] > 0 and (part != "drift" or x_value(row) <= SMALL_STEP)]
        fitted = [] if part == "descent" else fitted
        slope, error = power_law(map(x_value, fitted), (row["value"] for row in fitted))
        found = series_points(same)
        last = found[-2:] if part not in ("drift", "descent") else []
        last_slope, _ = power_law((point.x for point in last), (point.mean for point in last))
        pairs = [(point.mean, point.bound) for point in found if point.bound is not None]
        ratios = [bound / mean for mean, bound in pairs if mean > 0]
        summary.append(
            {
                "part": part,
                "series": series,
                "quantity": quantity,
                "seeds": len({row["seed"] for row in same}),
                "slope": slope,
                "slope_error": error,
                "last_slope": last_slope,
                "expected_slope": expected_slope(part, quantity) if len(found) > 1 else math.nan,
                "least_bound_over_value": min(ratios, default=math.nan),
                "most_bound_over_value": max(ratios, default=math.nan),
                "places": len(found),
                "above_bound": sum(mean > bound for mean, bound in pairs),
            }
        )
    return summary
