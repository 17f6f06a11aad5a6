"""The progress bar of a search."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from comfedl.training.progress import LOGS, TwoLines, emit
from comfedl.utils import checks


class SearchProgress:
    """Trials done, time left, the best value and the current trial's status; silent without a terminal.

    With ``log="json"`` the same goes to standard output as lines of JSON. A running trial counts by the fraction of its
    steps, so that the time estimate is updated before the trial ends.
    """

    def __init__(self, trials: int, steps: int, metric: str, log: str = "bar") -> None:
        checks.one_of("--log", log, LOGS)
        console = Console(stderr=True)
        self._trials, self._json = trials, log == "json"
        self._steps, self._metric = steps, metric
        self._running: dict[int, float] = {}
        self._done, self._best = 0, ""
        self._bar = TwoLines(
            TextColumn("tuning"),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.total:g} trials"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}"),
            console=console,
            disable=self._json or not console.is_terminal,
            speed_estimate_period=3600,  # trials may be long
        )
        self._task = self._bar.add_task("tuning", total=trials, done=0, best="")

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()

    def step_done(self, trial: int, step: int, status: str = "") -> None:
        """A trial has reached this step; ``status`` says how its clients are doing."""
        self._running[trial] = step / self._steps
        self._bar.said = f"trial {trial}, step {step}/{self._steps}; {status}"
        if self._json:
            emit("step", trial=trial, step=step, steps=self._steps, said=status)
        self._update()

    def trial_done(self, trial: int | None, done: int, best: float | None) -> None:
        """A trial has ended; ``done`` counts all of them, ``best`` is the best value so far."""
        self._running.pop(-1 if trial is None else trial, None)
        self._done = done
        self._best = "" if best is None else f"best {self._metric} {best:.4g}"
        if self._json:
            emit("trial", trial=trial, done=done, trials=self._trials, metric=self._metric, best=best)
        self._update()

    def _update(self) -> None:
        completed = self._done + sum(self._running.values())
        self._bar.update(self._task, completed=completed, done=self._done, best=self._best)
