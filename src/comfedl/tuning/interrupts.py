"""Ctrl-C and SIGTERM: a trial stops at once, but what is being written to the study is written first.

An interrupt in the middle of a database's work may be lost (Python drops what is raised where an object is let go of)
or leave the session unusable. So it is remembered, and raised before and after such work.
"""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Iterator

from comfedl.tuning.run_trial import Outcome, Task
from comfedl.tuning.worker_pool import Asked
from comfedl.utils import signals


class Stops:
    """Signals to stop, caught for as long as this is entered."""

    def __init__(self) -> None:
        self._asked = self._held = False

    def __enter__(self) -> Stops:
        self._before = signals.caught(self._stop)
        for number, handler in self._before.items():
            if handler is signal.SIG_IGN:  # as in a shell's background, where Ctrl-C is for others
                signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        signals.let_go(self._before)

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if first and not self._held:  # once is enough, and another would cut into the end
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No signal interrupts what is done here."""
        self._held, before = True, self._held
        try:
            yield
        finally:
            self._held = before

    def check(self) -> None:
        """Stop if that was asked for."""
        if self._asked:
            raise KeyboardInterrupt


class Whole:
    """A study that is asked and told without interruption."""

    def __init__(self, study: Asked, stops: Stops) -> None:
        self._study, self._stops = study, stops

    def left(self) -> int:
        with self._wholly():
            return self._study.left()

    def next(self) -> Task | None:
        with self._wholly():
            return self._study.next()

    def report(self, task: Task, step: int, value: float, said: str) -> bool:
        with self._wholly():
            return self._study.report(task, step, value, said)

    def tell(self, task: Task, outcome: Outcome) -> None:
        with self._wholly():
            self._study.tell(task, outcome)

    @contextlib.contextmanager
    def _wholly(self) -> Iterator[None]:
        self._stops.check()
        with self._stops.held():
            yield
        self._stops.check()
