"""A live progress bar for a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from comfedl.callbacks import Callback
from comfedl.metrics import Row
from comfedl.result import Result


class Progress(Callback):
    """Round, time left, and the mean and worst client as last evaluated; nothing where there is no terminal."""

    def __init__(self, rounds: int, label: str = "training") -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[seen]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=rounds, seen="")

    def started(self) -> None:
        self._bar.start()

    def round_done(self, number: int) -> None:
        self._bar.update(self._task, completed=number)

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        for metric in ("validation.accuracy", "train.accuracy", "validation.loss", "train.loss"):
            if f"{metric}.mean" in row:
                seen = f"{metric} mean {row[f'{metric}.mean']:.3f}, worst {row[f'{metric}.worst']:.3f}"
                self._bar.update(self._task, seen=seen)
                return

    def finished(self, result: Result) -> None:
        self._bar.stop()

    def failed(self, error: BaseException) -> None:
        self._bar.stop()
