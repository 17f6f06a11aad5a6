"""Several threads for chunks of clients, where that is faster than one.

Torch lets go of Python's lock while it computes, so threads share out long operations well and short ones badly. A
chunk's numbers are the same wherever it runs, so which of the two is used may be found out by the clock.
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
Found = TypeVar("Found")

# A chunk that takes this many seconds is worth a thread without a trial.
LONG = 0.02
# The calls of a step that are timed, by whether threads are used; the first of each kind warms up.
TRIAL = (False, True, False, True, False, True)


class ThreadPool:
    """``workers`` threads, numbered from 0; one call of ``run`` at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._times: dict[str, list[float]] = {}  # of each step, seconds a chunk by the calls of its trial
        self._choice: dict[str, bool] = {}

    def run(self, step: str, job: Callable[[int, Chunk], Found], chunks: Sequence[Chunk]) -> list[Found]:
        """``job(worker, chunk)`` for every chunk, in their order; no two jobs have one worker at a time."""
        if self.workers == 1 or len(chunks) == 1:
            return [job(0, chunk) for chunk in chunks]
        times = self._times.setdefault(step, [])
        threads = self._choice.get(step, TRIAL[min(len(times), len(TRIAL) - 1)])
        start = time.perf_counter()
        found = self._share_out(job, chunks) if threads else [job(0, chunk) for chunk in chunks]
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
        often = f"{self.workers} threads" if self._choice[step] else "one thread"
        logger.info("The step %r runs on %s (%.3g ms a chunk of clients).", step, often, min(times) * 1e3)

    def _share_out(self, job: Callable[[int, Chunk], Found], chunks: Sequence[Chunk]) -> list[Found]:
        if self._pool is None:
            # Each thread computes alone: the others are busy with clients of their own.
            self._pool = ThreadPoolExecutor(self.workers, "comfedl", initializer=torch.set_num_threads, initargs=(1,))
            self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
            for worker in range(self.workers):
                self._idle.put(worker)

        def task(chunk: Chunk) -> Found:
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
            wait(futures)  # of those that could not be cancelled: where one job fails, no other goes on behind it
