"""What runs are judged by: which metrics the records hold, and what a difference over seeds is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from comfedl.analysis.read_runs import Method
from comfedl.utils.errors import ConfigError

SPLITS = ("train", "validation", "test")
PERSONAL = "personal_"


@dataclass(frozen=True)
class Measures:
    """The splits and metrics that the records hold, and the ones to judge by."""

    splits: Sequence[str]
    metrics: Sequence[str]
    personal: bool
    split: str
    metric: str

    @property
    def key(self) -> str:
        return f"{self.split}.{self.metric}"

    @property
    def base(self) -> str:
        """The metric, whether it is judged of the global model or of the personal ones."""
        return self.metric.removeprefix(PERSONAL)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What stands before a metric's name: nothing for the global model's, and the personal models' mark."""
        return ("", PERSONAL) if self.personal else ("",)

    @property
    def spoken(self) -> str:
        """The metric in words."""
        return self.metric.replace("_", " ")


def measures(methods: Iterable[Method], split: str | None = None, metric: str | None = None) -> Measures:
    """What there is; judged are validation data unless asked otherwise, by accuracy where there is one."""
    keys = [key.split(".") for method in methods for run in method.runs for key in (run.rounds or [{}])[-1]]
    named = [key for key in keys if len(key) == 3 and key[2] == "mean"]
    splits = [name for name in SPLITS if any(key[0] == name for key in named)]
    if not splits:
        raise ConfigError("The runs have not evaluated a round yet; look again when they have.")
    if split is not None and split not in splits:
        raise ConfigError(f"--split is {split!r}, but the runs have {', '.join(splits)}.")
    every = dict.fromkeys(key[1] for key in named)
    if metric is not None and metric not in every:
        raise ConfigError(f"--metric is {metric!r}, but the runs have {', '.join(every)}.")
    found = dict.fromkeys(name for name in every if not name.startswith(PERSONAL))
    usual = "accuracy" if "accuracy" in found else next((name for name in found if name != "loss"), "loss")
    judged = metric.removeprefix(PERSONAL) if metric else usual
    ordered = sorted(found, key=lambda name: (name != judged, name == "loss"))
    default = next(name for name in ("validation", "test", "train") if name in splits)
    personal = any(name.startswith(PERSONAL) for name in every)
    return Measures(splits, ordered, personal, split or default, metric or judged)


@dataclass(frozen=True)
class Difference:
    """A mean difference between two methods, over ``seeds`` of each, and its standard error (NaN for one seed)."""

    gap: float
    error: float
    seeds: int

    @property
    def noise(self) -> bool | None:
        """Whether it is within twice its standard error; None where one seed cannot tell."""
        return None if math.isnan(self.error) else abs(self.gap) <= 2 * self.error


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """``other - one``, paired by seed where the seeds are the same: they move both methods alike.

    >>> difference({0: 0.5, 1: 0.7}, {0: 0.6, 1: 0.8}).noise
    False
    """
    a, b = (np.array([numbers[seed] for seed in sorted(numbers)]) for numbers in (one, other))
    if one.keys() == other.keys():
        return Difference(float((b - a).mean()), error(b - a), len(a))
    return Difference(float(b.mean() - a.mean()), math.hypot(error(a), error(b)), min(len(a), len(b)))


def error(numbers: Sequence[float] | np.ndarray) -> float:
    """The standard error of a mean; NaN for one number."""
    values = np.asarray(numbers, dtype=np.float64)
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
