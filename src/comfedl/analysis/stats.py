"""Which metric to compare runs by, and whether a difference over seeds is more than noise."""

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
class MetricChoice:
    """The recorded splits and metrics, and the split and metric to compare runs by."""

    splits: Sequence[str]
    metrics: Sequence[str]
    has_personal: bool
    split: str
    metric: str

    @property
    def key(self) -> str:
        return f"{self.split}.{self.metric}"

    @property
    def base_metric(self) -> str:
        """The metric without the prefix of personal models."""
        return self.metric.removeprefix(PERSONAL)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of recorded metrics: none for the global model, and the personal models' where recorded."""
        return ("", PERSONAL) if self.has_personal else ("",)

    @property
    def label(self) -> str:
        """The metric in plain words."""
        return self.metric.replace("_", " ")


def choose_metric(methods: Iterable[Method], split: str | None = None, metric: str | None = None) -> MetricChoice:
    """Default to the validation split, and to accuracy where it was recorded."""
    keys = [key.split(".") for method in methods for run in method.runs for key in (run.rounds or [{}])[-1]]
    means = [key for key in keys if len(key) == 3 and key[2] == "mean"]
    splits = [name for name in SPLITS if any(key[0] == name for key in means)]
    if not splits:
        raise ConfigError("The runs have not evaluated a round yet; try again once they have.")
    if split is not None and split not in splits:
        raise ConfigError(f"--split is {split!r}, but the runs have {', '.join(splits)}.")
    recorded = dict.fromkeys(key[1] for key in means)
    if metric is not None and metric not in recorded:
        raise ConfigError(f"--metric is {metric!r}, but the runs have {', '.join(recorded)}.")
    shared = [name for name in recorded if not name.startswith(PERSONAL)]
    usual = "accuracy" if "accuracy" in shared else next((name for name in shared if name != "loss"), "loss")
    main = metric.removeprefix(PERSONAL) if metric else usual
    ordered = sorted(shared, key=lambda name: (name != main, name == "loss"))
    default = next(name for name in ("validation", "test", "train") if name in splits)
    has_personal = any(name.startswith(PERSONAL) for name in recorded)
    return MetricChoice(splits, ordered, has_personal, split or default, metric or main)


@dataclass(frozen=True)
class Difference:
    """The mean difference between two methods over ``seeds`` seeds, with its standard error (NaN for one seed)."""

    mean: float
    error: float
    seeds: int

    @property
    def within_noise(self) -> bool | None:
        """Whether the difference is at most two standard errors; None for a single seed."""
        return None if math.isnan(self.error) else abs(self.mean) <= 2 * self.error


def difference(base: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """``other - base``, from values by seed.

    Values are paired where both have the same seeds, since a seed (its split, its initial model) shifts both alike.

    >>> difference({0: 0.5, 1: 0.7}, {0: 0.6, 1: 0.8}).within_noise
    False
    """
    a, b = (np.array([values[seed] for seed in sorted(values)]) for values in (base, other))
    if base.keys() == other.keys():
        return Difference(float((b - a).mean()), standard_error(b - a), len(a))
    error = math.hypot(standard_error(a), standard_error(b))
    return Difference(float(b.mean() - a.mean()), error, min(len(a), len(b)))


def standard_error(values: Sequence[float] | np.ndarray, single: float = math.nan) -> float:
    """The standard error of the mean; ``single`` is returned for fewer than two values."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else single
