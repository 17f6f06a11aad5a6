"""Trials in worker processes, which report to the process that owns the study."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch

from comfedl.tuning.run_trial import DataCache, Task, TrialOutcome, run_task
from comfedl.utils.errors import MetricMissing, WorkerDied
from comfedl.utils.process_pool import SPAWN, init_worker

READY = "ready"


class TrialSource(Protocol):
    """What hands out trials and receives their results: a study."""

    def remaining(self) -> int: ...

    def ask(self) -> Task | None: ...

    def report(self, task: Task, step: int, value: float, status: str) -> bool: ...

    def tell(self, task: Task, outcome: TrialOutcome) -> None: ...


def run_sequentially(study: TrialSource, data: DataCache) -> None:
    """Run trials one after another in this process."""
    while (task := study.ask()) is not None:
        study.tell(task, run_task(task, data, partial(study.report, task)))


def run_in_processes(study: TrialSource, jobs: int) -> None:
    """Run ``jobs`` trials at a time; the workers share this process's number of torch threads."""
    threads = max(1, torch.get_num_threads() // jobs)
    workers: list[_Worker] = []
    try:
        workers += (_Worker(threads) for _ in range(min(jobs, study.remaining())))
        for worker in workers:
            worker.start()
        while True:
            for worker in workers:
                if worker.idle and (task := study.ask()) is not None:
                    worker.run(task)
            busy = {worker.connection: worker for worker in workers if not worker.idle}
            if not busy:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                busy[connection].receive(study)
    finally:
        for worker in workers:
            worker.terminate()


class _Worker:
    """A process that runs the trials it is given."""

    def __init__(self, threads: int) -> None:
        self.connection, self._child_end = SPAWN.Pipe()
        self._task: Task | None = None
        self._ready = False
        self._process = SPAWN.Process(target=_work, args=(self._child_end, threads), daemon=True)

    def start(self) -> None:
        """Start the process. Ctrl-C reaches all processes of a terminal; only the parent acts on it."""
        with _blocked(signal.SIGINT):
            self._process.start()
        self._child_end.close()

    @property
    def idle(self) -> bool:
        return self._ready and self._task is None

    def run(self, task: Task) -> None:
        self._task = task
        self.connection.send(task)

    def receive(self, study: TrialSource) -> None:
        """Handle one message: the worker is ready, an intermediate value, an outcome or an error."""
        try:
            message = self.connection.recv()
            if self._task is not None and isinstance(message, tuple):
                self.connection.send(study.report(self._task, *message))
        except (EOFError, ConnectionError):
            self._process.join()
            raise WorkerDied(self._process.exitcode) from None
        if isinstance(message, Exception):
            raise message
        self._ready = True
        if self._task is not None and isinstance(message, TrialOutcome):
            study.tell(self._task, message)
            self._task = None

    def terminate(self) -> None:
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join()
        self.connection.close()


@contextlib.contextmanager
def _blocked(number: int) -> Iterator[None]:
    """Block a signal: processes started in this block inherit the mask, this process gets the signal afterwards."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # when it starts, it unblocks SIGINT in this process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerError(RuntimeError):
    """An unexpected error in a worker, with its traceback."""


def _work(connection: Connection, threads: int) -> None:
    init_worker(threads)
    data = DataCache()
    connection.send(READY)

    def report(step: int, value: float, status: str) -> bool:
        connection.send((step, value, status))
        return bool(connection.recv())

    while True:
        try:
            connection.send(run_task(connection.recv(), data, report))
        except (EOFError, ConnectionError):
            return
        except MetricMissing as error:
            connection.send(error)
        except Exception:
            connection.send(WorkerError(f"A trial raised an error:\n{traceback.format_exc()}"))
