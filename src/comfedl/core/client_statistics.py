"""Statistics over clients: mean, worst client, worst tenth and standard deviation.

Every client counts once, however many samples it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from comfedl.models import metrics

Row = dict[str, float | int | str | None]


def base(name: str) -> str:
    """The metric behind a column's name: ``"auc"`` for ``"validation.personal_auc"``."""
    return name.rpartition(".")[2].removeprefix("personal_")


def smaller_is_better(metric: str) -> bool:
    """Whether the worst client is the one with the largest value."""
    return metrics.smaller_is_better(base(metric))


def undefinable(metric: str) -> bool:
    """Whether a client may lack the metric (AUC on a single class, or a user's own); every client has a loss."""
    return base(metric) != "loss"


def summarise(metric: str, values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean, worst, mean of the worst tenth (at least one client) and standard deviation over clients.

    The worst client has the largest loss or error, or the smallest value of any other metric.

    >>> summarise("accuracy", [0.9, 0.5])
    {'mean': 0.7, 'worst': 0.5, 'worst10': 0.5, 'std': 0.2}
    """
    numbers = np.asarray(values, dtype=np.float64)
    worst_first = np.sort(numbers)[:: -1 if smaller_is_better(metric) else 1]
    tenth = worst_first[: math.ceil(len(numbers) / 10)]
    # Scaling huge values by a power of two keeps sums and squares finite; it is exact, so nothing else changes.
    scale = 2.0 ** max(0, math.frexp(float(np.abs(numbers).max()))[1] - 400)
    return {
        "mean": float((numbers / scale).mean() * scale),
        "worst": float(worst_first[0]),
        "worst10": float((tenth / scale).mean() * scale),
        "std": float((numbers / scale).std() * scale),
    }


def effective_clients(weights: Sequence[float]) -> float:
    """``(sum r)^2 / sum r^2``: how many equally weighted clients the weights are worth.

    >>> effective_clients([0.25, 0.25, 0.25, 0.25])
    4.0
    """
    r = np.asarray(weights, dtype=np.float64)
    square = float((r**2).sum())
    return float(r.sum()) ** 2 / square if square else 0.0


def divergence(weights: Sequence[float]) -> float:
    """``sum_i r_i log(m r_i)``, the KL divergence of m weights from uniform.

    >>> divergence([0.5, 0.5])
    0.0
    """
    r = np.asarray(weights, dtype=np.float64)
    r = r[r > 0] / r.sum() if r.sum() > 0 else r[:0]
    return float((r * np.log(len(weights) * r)).sum())


def summarise_columns(columns: Mapping[str, Sequence[float] | NDArray[np.float64]]) -> dict[str, float]:
    """Summaries keyed like ``"validation.accuracy.worst"``, from one column of values per metric.

    If a metric is undefined for some clients of a split, ``"validation.auc.clients"`` counts those that have it.
    """
    found = {
        f"{name}.{statistic}": number
        for name, values in columns.items()
        for statistic, number in summarise(name, values).items()
    }
    for name, values in columns.items():
        all_clients = columns.get(f"{name.rpartition('.')[0]}.loss", values)
        if undefinable(name) and len(values) < len(all_clients):
            found[f"{name}.clients"] = len(values)
    return found


def nested(row: Mapping[str, float | int | str | None]) -> dict[str, dict[str, dict[str, float]]]:
    """``{"train.loss.mean": 1.0}`` as ``{"train": {"loss": {"mean": 1.0}}}``; other keys are dropped."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name, value in row.items():
        parts = name.split(".")
        if len(parts) == 3 and isinstance(value, int | float):
            out.setdefault(parts[0], {}).setdefault(parts[1], {})[parts[2]] = float(value)
    return out
