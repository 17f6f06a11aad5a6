"""Ctrl-C and SIGTERM: a trial stops at once, but a write to the study is completed first.

An exception raised in the middle of a database call may get lost (Python drops exceptions raised in destructors) or
leave the session unusable. So during such calls the signal is only noted, and raised before the next or after this one.
"""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Iterator

from comfedl.tuning.run_trial import Task, TrialOutcome
from comfedl.tuning.worker_pool import TrialSource
from comfedl.utils import signals


class InterruptGuard:
    """Turns SIGINT and SIGTERM into one KeyboardInterrupt for the duration of a ``with`` block."""

    def __init__(self) -> None:
        self._interrupted = self._deferring = False

    def __enter__(self) -> InterruptGuard:
        self._before = signals.install_handlers(self._handle)
        for number, handler in self._before.items():
            if handler is signal.SIG_IGN:  # a shell ignores SIGINT for its background jobs: leave it so
                signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        signals.restore_handlers(self._before)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        first, self._interrupted = not self._interrupted, True
        if first and not self._deferring:  # a second one would interrupt the cleanup
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this block signals are only noted."""
        self._deferring, before = True, self._deferring
        try:
            yield
        finally:
            self._deferring = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has been noted."""
        if self._interrupted:
            raise KeyboardInterrupt


class GuardedStudy:
    """A study whose calls are never interrupted halfway."""

    def __init__(self, study: TrialSource, guard: InterruptGuard) -> None:
        self._study, self._guard = study, guard

    def remaining(self) -> int:
        with self._guarded():
            return self._study.remaining()

    def ask(self) -> Task | None:
        with self._guarded():
            return self._study.ask()

    def report(self, task: Task, step: int, value: float, status: str) -> bool:
        with self._guarded():
            return self._study.report(task, step, value, status)

    def tell(self, task: Task, outcome: TrialOutcome) -> None:
        with self._guarded():
            self._study.tell(task, outcome)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        self._guard.check()
        with self._guard.deferred():
            yield
        self._guard.check()
