"""Worker processes: how they start, what ends them, and what it means when one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch

from comfedl.utils.errors import WorkerDied

SPAWN = multiprocessing.get_context("spawn")  # forking a process that has threads, as torch does, may deadlock


def init_worker(threads: int, ignore_ctrl_c: bool = True) -> None:
    """Set up a worker process: its share of torch's threads, and an end when its parent is killed.

    Ctrl-C reaches every process of a terminal; a worker that ignores it leaves the decision to its parent.
    """
    if ignore_ctrl_c:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(threads)


def _exit_with_parent() -> None:
    """Without this, workers of a killed parent would keep writing to the folders of the next one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def process_pool(
    workers: int, initializer: Callable[..., None], arguments: tuple[Any, ...]
) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned workers. Leaving the block cancels pending work and waits for running work.

    Raises:
        WorkerDied: a worker was killed.
    """
    pool = ProcessPoolExecutor(workers, SPAWN, initializer, arguments)
    try:
        yield pool
    except BrokenProcessPool:
        raise WorkerDied from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within this block SIGTERM raises KeyboardInterrupt, as Ctrl-C does; signals belong to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
