"""A live progress bar for a search."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from comfedl.training.progress import LOGS, TwoLines, emit
from comfedl.utils import checks


class Watch:
    """Trials done, time left, the best value so far and how a trial stands; nothing where there is no terminal.

    ``log`` "json" says the same in lines of JSON on standard output.

    A trial under way counts by the share of its steps, so that the estimate does not wait for a trial's end.
    """

    def __init__(self, trials: int, steps: int, metric: str, log: str = "bar") -> None:
        checks.one_of("--log", log, LOGS)
        console = Console(stderr=True)
        self._trials, self._json = trials, log == "json"
        self._steps, self._metric = steps, metric
        self._under_way: dict[int, float] = {}
        self._done, self._seen = 0, ""
        self._bar = TwoLines(
            TextColumn("tuning"),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.total:g} trials"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[seen]}"),
            console=console,
            disable=self._json or not console.is_terminal,
            speed_estimate_period=3600,  # trials may be long
        )
        self._task = self._bar.add_task("tuning", total=trials, done=0, seen="")

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()

    def moved(self, trial: int, step: int, said: str = "") -> None:
        """A trial has come to this step, where its clients stand so."""
        self._under_way[trial] = step / self._steps
        self._bar.said = f"trial {trial}, step {step}/{self._steps}; {said}"
        if self._json:
            emit("step", trial=trial, step=step, steps=self._steps, said=said)
        self._show()

    def ended(self, trial: int | None, done: int, best: float | None) -> None:
        """A trial has ended; so many have now, and this is the best value."""
        self._under_way.pop(-1 if trial is None else trial, None)
        self._done = done
        self._seen = "" if best is None else f"best {self._metric} {best:.4g}"
        if self._json:
            emit("trial", trial=trial, done=done, trials=self._trials, metric=self._metric, best=best)
        self._show()

    def _show(self) -> None:
        completed = self._done + sum(self._under_way.values())
        self._bar.update(self._task, completed=completed, done=self._done, seen=self._seen)
