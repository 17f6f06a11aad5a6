"""What the measured points say: slopes beside those of the theory, and bounds beside what they bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from comfedl_reproduction.theory.measure import Row

# Beyond this tau * eta a model moves so far in a round that its drift is no longer expected to go by the square.
SMALL = 0.25
# The slopes that the theory gives: of the bound for the rate and the roots, of a Taylor expansion for the others.
EXPECTED = {
    "all rounds": -0.5,
    "drift of the average": 2.0,
    "drift of the clients": 2.0,
    "inner value rms": -0.5,
    "direction rms": -0.5,
    "direction bias": -1.0,
}


class Place(NamedTuple):
    """A quantity at one place: what it is drawn against, its mean over seeds with the standard error, and its bound."""

    x: float
    tau: int | None
    mean: float
    error: float
    bound: float | None


def power_law(x: Iterable[float], y: Iterable[float]) -> tuple[float, float]:
    """The slope of log y over log x by least squares, and its standard error; NaN where it cannot be told.

    >>> slope, error = power_law([1, 2, 4], [3, 12, 48])
    >>> round(slope, 9), round(error, 9)
    (2.0, 0.0)
    """
    u, v = np.log(np.asarray(list(x), dtype=float)), np.log(np.asarray(list(y), dtype=float))
    if len(u) == 0 or np.ptp(u) == 0:
        return math.nan, math.nan
    u, v = u - u.mean(), v - v.mean()
    slope = float(u @ v / (u @ u))
    rest = v - slope * u
    return slope, math.sqrt(float(rest @ rest / (u @ u)) / (len(u) - 2)) if len(u) > 2 else math.nan


def abscissa(row: Row) -> float:
    """What a quantity is drawn and fitted against: T, tau * eta or b."""
    if row["part"] == "drift":
        return float(row["tau"] * row["eta"])
    return float(row["T"] if "T" in row else row["b"])


def groups(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that have these columns in common."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def places(rows: Iterable[Row]) -> list[Place]:
    """The means over seeds of one series, in the order of what they are drawn against."""
    found = []
    for same in groups(rows, "T", "tau", "eta", "b").values():
        values, first = np.asarray([row["value"] for row in same]), same[0]
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        found.append(Place(abscissa(first), first.get("tau"), float(values.mean()), error, first["bound"]))
    return sorted(found, key=lambda place: (place.x, place.tau or 0))


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row a series. The slope is fitted to all seeds; ``last_slope`` is between the last two places."""
    summary = []
    for (part, series, quantity), same in groups(rows, "part", "series", "quantity").items():
        fitted = [row for row in same if row["value"] > 0 and (part != "drift" or abscissa(row) <= SMALL)]
        slope, error = power_law(map(abscissa, fitted), (row["value"] for row in fitted))
        found = places(same)
        last = found[-2:] if part != "drift" else []
        last_slope, _ = power_law((place.x for place in last), (place.mean for place in last))
        pairs = [(place.mean, place.bound) for place in found if place.bound is not None]
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
                "expected_slope": EXPECTED.get(quantity, math.nan) if len(found) > 1 else math.nan,
                "least_bound_over_value": min(ratios, default=math.nan),
                "most_bound_over_value": max(ratios, default=math.nan),
                "places": len(found),
                "above_bound": sum(mean > bound for mean, bound in pairs),
            }
        )
    return summary
