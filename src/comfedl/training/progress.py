"""Progress of a run: a live display in a terminal, or one JSON line per evaluated round."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn
from rich.text import Text

from comfedl.core.client_statistics import Row
from comfedl.training.callbacks import Callback
from comfedl.training.client_records import Evaluation
from comfedl.training.result import Result
from comfedl.utils import checks

LOGS = ("bar", "json")
WATCHED = ("accuracy", "rmse", "auc", "loss")


@dataclass(frozen=True)
class Seen:
    """What to display of a round: a metric's mean and worst client, and the client with the largest weight."""

    metric: str
    mean: float
    worst: float | None
    worst_client: str | None
    heaviest_client: str | None
    heaviest_weight: float | None

    def __str__(self) -> str:
        scores = f"{self.metric.replace('.', ' ')}: mean {self.mean:.3f}"
        if self.worst is not None:
            worst = "" if self.worst_client is None else f" ({_clipped(self.worst_client)})"
            scores += f", worst {self.worst:.3f}{worst}"
        if self.heaviest_client is None:
            return scores
        return f"{scores}; heaviest {_clipped(self.heaviest_client)} {self.heaviest_weight:.3f}"


def seen(row: Row, clients: Sequence[Row]) -> Seen | None:
    """What to display of a round, on validation data if there are any; None if no known metric is recorded."""
    keys = (f"{split}.{metric}" for split in ("validation", "train") for metric in WATCHED)
    key = next((key for key in keys if f"{key}.mean" in row), None)
    if key is None:
        return None
    mean = float(row[f"{key}.mean"] or 0.0)
    if f"{key}.worst" not in row:  # only sums are known
        return Seen(key, mean, None, None, None, None)
    worst = float(row[f"{key}.worst"] or 0.0)
    values, weights = column(clients, key), column(clients, "weight")
    lowest = int(np.argmin(np.abs(np.nan_to_num(values - worst, nan=np.inf)))) if values.size else None
    heaviest = int(np.argmax(np.nan_to_num(weights))) if weights.size and np.nansum(weights) > 0 else None
    return Seen(
        key,
        mean,
        worst,
        None if lowest is None else str(clients[lowest]["client"]),
        None if heaviest is None else str(clients[heaviest]["client"]),
        None if heaviest is None else float(weights[heaviest]),
    )


def column(clients: Sequence[Row], key: str) -> np.ndarray:
    """One number per client (empty if an ``Evaluation`` does not have it for all), without making rows of many."""
    if isinstance(clients, Evaluation):
        column = clients.columns().get(key, np.zeros(0))
        return column if len(column) == len(clients) else np.zeros(0)
    values = [row.get(key) for row in clients]
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)


def _clipped(name: str, most: int = 24) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


class TwoLines(Bar):
    """A progress bar with a line of text below, cut to the terminal's width."""

    said = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.said:
            yield Text(f"  {self.said}", style="dim", no_wrap=True, overflow="ellipsis")


class Progress(Callback):
    """Shows the round, time left, mean, worst and heaviest client; nothing without a terminal."""

    def __init__(self, rounds: int, label: str = "training") -> None:
        console = Console(stderr=True)
        self._bar = TwoLines(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=rounds)

    def started(self) -> None:
        self._bar.start()

    def round_done(self, number: int) -> None:
        self._bar.update(self._task, completed=number)

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        if not self._bar.disable:
            self._bar.said = str(seen(row, clients) or "")

    def finished(self, result: Result) -> None:
        self._bar.stop()

    def failed(self, error: BaseException) -> None:
        self._bar.stop()


class JsonLines(Callback):
    """Writes a line of JSON for each evaluated round and for the end of the run."""

    def __init__(self, rounds: int, label: str = "training", file: IO[str] | None = None) -> None:
        self._rounds, self._label, self._file = rounds, label, file
        self._begun = time.monotonic()

    def started(self) -> None:
        self._begun = time.monotonic()

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        found = seen(row, clients)
        named = {} if found is None else {"worst_client": found.worst_client, "heaviest_client": found.heaviest_client}
        self.say("round", **row, rounds=self._rounds, **named, seconds=round(time.monotonic() - self._begun, 3))

    def finished(self, result: Result) -> None:
        self.say("finished", **result.summary())

    def failed(self, error: BaseException) -> None:
        self.say("failed", error=f"{type(error).__name__}: {error}")

    def say(self, event: str, **values: Any) -> None:
        """Write one line, and flush it."""
        emit(event, self._file, run=self._label, **values)


def emit(event: str, file: IO[str] | None = None, **values: Any) -> None:
    """Write one line of JSON to standard output, so that it can be piped."""
    print(json.dumps({"event": event, **values}), file=file or sys.stdout, flush=True)


def make_progress(log: str, rounds: int, label: str = "training") -> Callback:
    """The callback for the option ``--log``."""
    checks.one_of("--log", log, LOGS)
    return JsonLines(rounds, label) if log == "json" else Progress(rounds, label)
