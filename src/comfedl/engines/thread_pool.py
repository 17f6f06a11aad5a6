"""Runs chunks of clients on several threads if that is faster than on one.

Torch releases Python's global interpreter lock while it computes, so threads help with long operations, not with short
ones. A chunk's results do not depend on its thread, so the choice may be made by timing both.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

logger = logging.getLogger("comfedl")

Chunk = TypeVar("Chunk")
Output = TypeVar("Output")

# A chunk that takes this many seconds goes to threads without a trial.
LONG = 0.02
# Whether each of a step's timed calls uses threads; the first of each kind is a warm-up.
TRIAL = (False, True, False, True, False, True)


class ThreadPool:
    """``workers`` threads, numbered from 0; ``run`` is not reentrant."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._times: dict[str, list[float]] = {}  # by step: seconds per chunk in each call of its trial
        self._choice: dict[str, bool] = {}

    def run(self, step: str, job: Callable[[int, Chunk], Output], chunks: Sequence[Chunk]) -> list[Output]:
        """``job(worker, chunk)`` for every chunk, in order; no two jobs use the same worker at a time."""
        if self.workers == 1 or len(chunks) == 1:
            return [job(0, chunk) for chunk in chunks]
        times = self._times.setdefault(step, [])
        threads = self._choice.get(step, TRIAL[min(len(times), len(TRIAL) - 1)])
        start = time.perf_counter()
        found = self._run_threaded(job, chunks) if threads else [job(0, chunk) for chunk in chunks]
        if step not in self._choice:
            times.append((time.perf_counter() - start) / len(chunks))
            self._choose(step, times)
        return found

    def _choose(self, step: str, times: Sequence[float]) -> None:
        if len(times) == 1 and times[0] >= LONG:
            self._choice[step] = True
        elif len(times) == len(TRIAL):
            alone, shared = min(times[2], times[4]), min(times[3], times[5])
            self._choice[step] = shared < alone
        else:
            return
        threads = f"{self.workers} threads" if self._choice[step] else "one thread"
        logger.info("The step %r runs on %s (%.3g ms per chunk of clients).", step, threads, min(times) * 1e3)

    def _run_threaded(self, job: Callable[[int, Chunk], Output], chunks: Sequence[Chunk]) -> list[Output]:
        if self._pool is None:
            # Torch runs on one thread per worker: the other cores are busy with other clients.
            self._pool = ThreadPoolExecutor(self.workers, "comfedl", initializer=torch.set_num_threads, initargs=(1,))
            self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
            for worker in range(self.workers):
                self._idle.put(worker)

        def task(chunk: Chunk) -> Output:
            worker = self._idle.get()
            try:
                return job(worker, chunk)
            finally:
                self._idle.put(worker)

        futures = [self._pool.submit(task, chunk) for chunk in chunks]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # after a failure no other job may keep running in the background
