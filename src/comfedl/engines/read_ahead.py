"""Reads the samples of the next clients in a thread while others train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch


class ReadAhead:
    """The results of ``read(k)`` for k from 0 on, read in order by one thread.

    Args:
        sizes: about how many bytes each of them takes.
        bound: how many bytes may be read ahead or in use; the next one is always read.
    """

    def __init__(self, read: Callable[[int], Any], sizes: Sequence[int], bound: float) -> None:
        self._read, self._sizes, self._bound = read, sizes, bound
        self._thread = ThreadPoolExecutor(1, "comfedl read", initializer=torch.set_num_threads, initargs=(1,))
        self._futures: dict[int, Future[Any]] = {}
        self._next, self._held = 0, 0
        self._lock = threading.Lock()

    def take(self, k: int) -> Any:
        """The k-th result, once it has been read; it counts as in use until ``done(k)``. Any thread may call it."""
        with self._lock:
            while self._next < len(self._sizes) and (
                self._next <= k + 1 or self._held + self._sizes[self._next] <= self._bound
            ):
                self._futures[self._next] = self._thread.submit(self._read, self._next)
                self._held += self._sizes[self._next]
                self._next += 1
            future = self._futures.pop(k)
        return future.result()

    def done(self, k: int) -> None:
        """The k-th result is no longer in use."""
        with self._lock:
            self._held -= self._sizes[k]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)  # nothing is read for a step that has failed
