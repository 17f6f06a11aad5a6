"""One trial: a config run as ``comfedl run`` does it, its metric reported at every evaluated round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from comfedl.config.schema import Config, parse_config, run_config
from comfedl.core.client_statistics import Row
from comfedl.core.protocol import Diverged
from comfedl.core.reply_validation import QuorumError
from comfedl.data.federated import FederatedData
from comfedl.training.callbacks import Callback
from comfedl.training.progress import seen
from comfedl.tuning.plan import STATISTICS
from comfedl.utils.errors import ComfedlError, ConfigError
from comfedl.utils.toml import to_toml

# (step, value, how the clients stand in words) -> whether to stop here.
Report = Callable[[int, float, str], bool]

COMPLETE, PRUNED, DIVERGED, FAILED, INTERRUPTED = "complete", "pruned", "diverged", "failed", "interrupted"

# Data of several seeds are kept for the next trial up to about this size.
MOST_BYTES = 2**30


@dataclass(frozen=True)
class Task:
    """What a trial runs: settings, with so many seeds counted up from their own."""

    number: int
    settings: Mapping[str, Any]
    seeds: int
    metric: str


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: in which state, with which value of each seed, and why where it did not come to its end."""

    state: str
    values: Sequence[float] = ()
    reason: str = ""


@dataclass(frozen=True)
class Ended:
    """A trial that has ended; ``first`` is the number under which its point was first tried."""

    number: int
    first: int
    state: str
    value: float | None
    params: Mapping[str, Any]
    seconds: float | None
    reason: str


class MetricMissing(ConfigError):
    """The records have no such metric: no trial will."""


class _Pruned(Exception):
    """The pruner has seen enough."""


class _NotAll(Exception):
    """The metric is not one over all clients."""


class Data:
    """Clients' data without test data, which a trial never sees; kept from one trial to the next."""

    def __init__(self) -> None:
        self._kept: dict[str, FederatedData] = {}

    def __call__(self, config: Config, progress: bool = False) -> FederatedData:
        known = f"{config.seed} {to_toml(config.data.resolved())}"
        if known not in self._kept:
            if sum(_bytes(fed) for fed in self._kept.values()) > MOST_BYTES:
                self._kept.clear()
            self._kept[known] = _without_test(config.make_data(progress))
        return self._kept[known]


class _Reporter(Callback):
    """Reports the mean over the seeds so far at each evaluated round; the seeds' rounds follow one another."""

    def __init__(self, metric: str, clients: int, rounds: int, earlier: Sequence[dict[int, float]], report: Report):
        self._metric, self._clients, self._report = metric, clients, report
        self._earlier, self._first = earlier, rounds * len(earlier)
        self.curve: dict[int, float] = {}

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        value, round = row.get(self._metric), row["round"]
        assert isinstance(round, int)
        if not isinstance(value, int | float):
            raise MetricMissing(
                f"--metric is {self._metric!r}, which the records do not have; they have {_available(row)}."
            )
        if len(clients) < self._clients or not math.isfinite(value):
            raise _NotAll(
                f"Round {round}: {len(clients)} of {self._clients} clients could be evaluated, and {self._metric} is "
                f"{value:g}; the others have left the finite numbers."
            )
        self.curve[round] = float(value)
        mean = fmean([*(curve[round] for curve in self._earlier), self.curve[round]])
        if self._report(self._first + round, mean, str(seen(row, clients) or "")):
            raise _Pruned


def run_task(task: Task, data: Data, report: Report) -> Outcome:
    """Run a trial; whatever is wrong with its own values is its outcome and not an error."""
    curves: list[dict[int, float]] = []
    try:
        for i in range(task.seeds):
            config = parse_config(task.settings)
            config = config.model_copy(update={"seed": config.seed + i})
            fed = data(config)
            watch = _Reporter(task.metric, config.eval_clients or len(fed), config.rounds, curves, report)
            run_config(config, callbacks=[watch], fed=fed)
            curves.append(watch.curve)
    except _Pruned:
        return Outcome(PRUNED)
    except (Diverged, QuorumError, _NotAll) as error:
        return Outcome(DIVERGED, reason=str(error))
    except MetricMissing:
        raise
    except ComfedlError as error:
        return Outcome(FAILED, reason=str(error))
    return Outcome(COMPLETE, [list(curve.values())[-1] for curve in curves])


def _without_test(fed: FederatedData) -> FederatedData:
    splits = {"train": fed.train, "validation": fed.validation, "outer": fed.outer}
    return FederatedData.from_splits({name: split for name, split in splits.items() if split is not None})


def _bytes(fed: FederatedData) -> int:
    return sum(part.nbytes for part in fed.contents() if isinstance(part, Tensor))


def _available(row: Row) -> str:
    """The metrics that a choice can be made by, as short as they can be told."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in row if name.split(".")[-1] in STATISTICS)
    return f"{', '.join(names)}, each with .{', .'.join(STATISTICS)}"
