"""Trials in processes of their own, which report to the one that has the study."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch

from comfedl.tuning.run_trial import Data, MetricMissing, Outcome, Task, run_task
from comfedl.utils.errors import ComfedlError

READY = "ready"


class Asked(Protocol):
    """What gives trials to run, and hears of them."""

    def left(self) -> int: ...

    def next(self) -> Task | None: ...

    def report(self, task: Task, step: int, value: float, said: str) -> bool: ...

    def tell(self, task: Task, outcome: Outcome) -> None: ...


class WorkerDied(ComfedlError):
    """A process has ended in the middle of a trial."""


def run_here(study: Asked, data: Data) -> None:
    """Run trials one after another in this process."""
    while (task := study.next()) is not None:
        study.tell(task, run_task(task, data, partial(study.report, task)))


def run_in_processes(study: Asked, jobs: int) -> None:
    """Run as many trials at a time as there are jobs; each has its share of the threads that torch has here."""
    threads = max(1, torch.get_num_threads() // jobs)
    workers: list[_Worker] = []
    try:
        workers += (_Worker(threads) for _ in range(min(jobs, study.left())))
        for worker in workers:
            worker.start()
        while True:
            for worker in workers:
                if worker.idle and (task := study.next()) is not None:
                    worker.begin(task)
            busy = {worker.connection: worker for worker in workers if not worker.idle}
            if not busy:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                busy[connection].listen(study)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that runs the trials it is given."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, self._theirs = context.Pipe()
        self._task: Task | None = None
        self._ready = False
        self._process = context.Process(target=_work, args=(self._theirs, threads), daemon=True)

    def start(self) -> None:
        """Start the process. Ctrl-C reaches all processes of a terminal; this one alone shall act on it."""
        with _unheard(signal.SIGINT):
            self._process.start()
        self._theirs.close()

    @property
    def idle(self) -> bool:
        return self._ready and self._task is None

    def begin(self, task: Task) -> None:
        self._task = task
        self.connection.send(task)

    def listen(self, study: Asked) -> None:
        """Take one message: that it is ready, a value on a trial's way, its outcome, or an error."""
        try:
            message = self.connection.recv()
            if self._task is not None and isinstance(message, tuple):
                self.connection.send(study.report(self._task, *message))
        except (EOFError, ConnectionError):
            self._process.join()
            raise WorkerDied(
                f"A process that runs trials has ended (exit code {self._process.exitcode}), perhaps for want of "
                "memory; run the same command again to go on, with fewer --jobs."
            ) from None
        if isinstance(message, Exception):
            raise message
        self._ready = True
        if self._task is not None and isinstance(message, Outcome):
            study.tell(self._task, message)
            self._task = None

    def end(self) -> None:
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join()
        self.connection.close()


@contextlib.contextmanager
def _unheard(number: int) -> Iterator[None]:
    """What is started here never hears a signal; this process hears it afterwards."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # which would let the signal through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class TrialError(RuntimeError):
    """An error in a trial that is nobody's setting, with where it was raised."""


def _work(connection: Connection, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    data = Data()
    connection.send(READY)

    def report(step: int, value: float, said: str) -> bool:
        connection.send((step, value, said))
        return bool(connection.recv())

    while True:
        try:
            connection.send(run_task(connection.recv(), data, report))
        except (EOFError, ConnectionError):
            return
        except MetricMissing as error:
            connection.send(error)
        except Exception:
            connection.send(TrialError(f"A trial raised an error:\n{traceback.format_exc()}"))


def _end_with_parent() -> None:
    """Nobody hears of a trial whose search was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
