"""One trial: runs a config as ``comfedl run`` does, and reports its metric after every evaluated round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from comfedl.config.schema import Config, parse_config, run_config
from comfedl.core.client_statistics import Row
from comfedl.data.federated import FederatedData
from comfedl.training.callbacks import Callback
from comfedl.training.progress import seen
from comfedl.tuning.plan import STATISTICS
from comfedl.utils.errors import ComfedlError, Diverged, MetricMissing, QuorumError
from comfedl.utils.toml import to_toml

# (step, value, status line of the clients) -> whether to prune the trial.
Report = Callable[[int, float, str], bool]

COMPLETE, PRUNED, DIVERGED, FAILED, INTERRUPTED = "complete", "pruned", "diverged", "failed", "interrupted"

CACHE_BYTES = 2**30  # data of several seeds stay in memory up to about this size


@dataclass(frozen=True)
class Task:
    """What a trial runs: the settings, with ``seeds`` seeds counted up from the settings' own."""

    number: int
    settings: Mapping[str, Any]
    seeds: int
    metric: str


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended: its state, the metric for each seed, and the reason if it did not complete."""

    state: str
    values: Sequence[float] = ()
    reason: str = ""


@dataclass(frozen=True)
class FinishedTrial:
    """A trial that has ended; ``first_number`` is the number of the first trial of the same parameters."""

    number: int
    first_number: int
    state: str
    value: float | None
    params: Mapping[str, Any]
    seconds: float | None
    reason: str


class _Pruned(Exception):
    """The pruner stopped the trial."""


class _ClientsMissing(Exception):
    """The metric does not cover all clients."""


class DataCache:
    """The clients' data without the test split, which a trial never sees; kept for the next trial."""

    def __init__(self) -> None:
        self._cached: dict[str, FederatedData] = {}

    def __call__(self, config: Config, progress: bool = False) -> FederatedData:
        key = f"{config.seed} {to_toml(config.data.resolved())}"
        if key not in self._cached:
            if sum(_bytes(fed) for fed in self._cached.values()) > CACHE_BYTES:
                self._cached.clear()
            self._cached[key] = _without_test(config.make_data(progress))
        return self._cached[key]


class _MetricReporter(Callback):
    """Reports the mean over the seeds so far at each evaluated round; steps count on from one seed to the next."""

    def __init__(self, metric: str, clients: int, rounds: int, earlier: Sequence[dict[int, float]], report: Report):
        self._metric, self._clients, self._report = metric, clients, report
        self._earlier, self._first_step = earlier, rounds * len(earlier)
        self.curve: dict[int, float] = {}

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        value, round = row.get(self._metric), row["round"]
        assert isinstance(round, int)
        if not isinstance(value, int | float):
            raise MetricMissing(f"--metric is {self._metric!r}, which the run does not record; use {_available(row)}.")
        if len(clients) < self._clients or not math.isfinite(value):
            raise _ClientsMissing(
                f"Round {round}: {len(clients)} of {self._clients} clients could be evaluated and {self._metric} is "
                f"{value:g}; the other clients diverged (NaN or infinity)."
            )
        self.curve[round] = float(value)
        mean = fmean([*(curve[round] for curve in self._earlier), self.curve[round]])
        if self._report(self._first_step + round, mean, str(seen(row, clients) or "")):
            raise _Pruned


def run_task(task: Task, data: DataCache, report: Report) -> TrialOutcome:
    """Run a trial; an error caused by its hyper-parameters is an outcome and is not raised."""
    curves: list[dict[int, float]] = []
    try:
        for i in range(task.seeds):
            config = parse_config(task.settings)
            config = config.model_copy(update={"seed": config.seed + i})
            fed = data(config)
            reporter = _MetricReporter(task.metric, config.eval_clients or len(fed), config.rounds, curves, report)
            run_config(config, callbacks=[reporter], fed=fed)
            curves.append(reporter.curve)
    except _Pruned:
        return TrialOutcome(PRUNED)
    except (Diverged, QuorumError, _ClientsMissing) as error:
        return TrialOutcome(DIVERGED, reason=str(error))
    except MetricMissing:
        raise
    except ComfedlError as error:
        return TrialOutcome(FAILED, reason=str(error))
    return TrialOutcome(COMPLETE, [list(curve.values())[-1] for curve in curves])


def _without_test(fed: FederatedData) -> FederatedData:
    splits = {"train": fed.train, "validation": fed.validation, "outer": fed.outer}
    return FederatedData.from_splits({name: split for name, split in splits.items() if split is not None})


def _bytes(fed: FederatedData) -> int:
    return sum(part.nbytes for part in fed.contents() if isinstance(part, Tensor))


def _available(row: Row) -> str:
    """The recorded metrics that a trial can be judged by, in short form."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in row if name.split(".")[-1] in STATISTICS)
    return f"{', '.join(names)}, each with .{', .'.join(STATISTICS)}"
