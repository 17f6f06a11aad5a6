"""Many runs over many processes: each finished run is one file, and what is finished is not run again.

A run is a config with its seed, and its file is named by a hash of all its values, so that figures share runs. While
it goes its folder keeps checkpoints: a run that was killed goes on from its last one.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from multiprocessing.connection import wait as wait_for
from multiprocessing.sharedctypes import Synchronized, SynchronizedString
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from comfedl.config.schema import Config, parse_config, run_config
from comfedl.core.client_statistics import Row
from comfedl.core.protocol import Diverged
from comfedl.data.federated import FederatedData
from comfedl.training.callbacks import Callback
from comfedl.training.progress import TwoLines, emit, seen
from comfedl.utils.errors import ComfedlError
from comfedl.utils.files import write_atomic

Record = dict[str, Any]

MOST_NEWS = 400  # bytes of the line that says how the runs are going


@dataclass(frozen=True)
class Run:
    """A config with its seed."""

    settings: Mapping[str, Any]

    @cached_property
    def config(self) -> Config:
        return parse_config(self.settings)

    @cached_property
    def key(self) -> str:
        """A hash of every value of the config, defaults included."""
        text = json.dumps(self.config.resolved(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()

    @property
    def work(self) -> int:
        """About how long it takes, in local steps."""
        algorithm = self.config.make_algorithm()
        passes = 2 if hasattr(algorithm, "adapt_lr") or hasattr(algorithm, "lam") else 1
        return self.config.rounds * (algorithm.local_steps * passes + 1)


class Runner:
    """Runs what is not finished yet and gives the records of all."""

    def __init__(self, folder: Path, jobs: int, commit: str | None = None, log: str = "bar") -> None:
        self.folder, self.jobs, self.commit, self.log = folder, jobs, commit, log
        self.done = 0

    def record(self, run: Run) -> Record | None:
        """What a finished run has left."""
        path = self.folder / f"{run.key}.json"
        if not path.exists():
            return None
        found: Record = json.loads(path.read_text(encoding="utf-8"))
        return found

    def run(self, runs: Sequence[Run], label: str) -> dict[str, Record]:
        """The records of these runs by key; what is missing is run first, in this order."""
        unique = {run.key: run for run in runs}
        missing = [run for run in unique.values() if self.record(run) is None]
        if missing:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._perform(missing, label)
            self.done += len(missing)
        records = {key: self.record(run) for key, run in unique.items()}
        return {key: record for key, record in records.items() if record is not None}

    def _perform(self, runs: Sequence[Run], label: str) -> None:
        context = multiprocessing.get_context("spawn")
        stop, steps = context.Event(), context.Value("d", 0.0)
        news = cast(SynchronizedString, context.Array("c", MOST_NEWS))
        jobs = min(self.jobs, len(runs))
        threads = max(1, (os.cpu_count() or 1) // jobs)
        pool = ProcessPoolExecutor(jobs, context, _start, (threads, stop, steps, news))
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with _bar(label, sum(run.work for run in runs), self.log) as show:
                futures = [pool.submit(_perform, run.settings, run.work, self.folder, self.commit) for run in runs]
                waiting: set[Future[None]] = set(futures)
                while waiting:
                    ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                    for future in ended:
                        future.result()
                    said = news.value.decode(errors="ignore")
                    show(steps.value, len(futures) - len(waiting), len(futures), said)
        except BrokenProcessPool:
            raise ComfedlError(
                "A process of a run was ended from outside (out of memory?); start the same command again with fewer "
                "--jobs: finished runs are kept."
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _bar(label: str, total: float, log: str) -> Iterator[Any]:
    """A bar over all runs with the time left and how a run stands; nothing where there is no terminal."""
    console, told = Console(stderr=True), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[runs]}"))
    with TwoLines(
        *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console,
        disable=log == "json" or not console.is_terminal, speed_estimate_period=300,
    ) as bar:  # fmt: skip
        task = bar.add_task(label, total=total, runs="")

        def show(steps: float, done: int, runs: int, said: str) -> None:
            nonlocal told
            bar.said = said
            bar.update(task, completed=steps, runs=f"{done} of {runs} runs")
            if log == "json" and done > told:
                emit("runs", of=label, done=done, runs=runs, share=round(steps / total, 4))
                told = done

        yield show


# What a process of the pool does.

_stop: Event
_steps: Synchronized[float]
_news: SynchronizedString


def _start(threads: int, stop: Event, steps: Synchronized[float], news: SynchronizedString) -> None:
    global _stop, _steps, _news
    import torch

    _stop, _steps, _news = stop, steps, news
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()


def _die_with(sentinel: int) -> None:
    """A process whose parent was killed must not go on writing into the folders of the next one."""
    wait_for([sentinel])
    os._exit(1)


class _Watch(Callback):
    """Counts rounds for the bar, keeps the rows, and stops the run when the parent says so."""

    def __init__(self, label: str, work: float, rounds: int) -> None:
        self.label = label
        self.rows: list[Row] = []
        self.each, self.counted, self.rounds = work / rounds, 0, rounds

    def round_done(self, number: int) -> None:
        with _steps.get_lock():
            _steps.value += self.each * (number - self.counted)
        self.counted = number
        if _stop.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # the run's folder ends the round with a checkpoint

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        self.rows.append(row)
        said = f"{self.label}, round {row['round']}/{self.rounds}; {seen(row, clients) or ''}"
        _news.value = said.encode()[: MOST_NEWS - 1]


@lru_cache(maxsize=1)
def _data(table: str, seed: int) -> FederatedData:
    """The data of the last run: the next one often has the same."""
    return parse_config({**json.loads(table), "seed": seed}).make_data()


def _perform(settings: Mapping[str, Any], work: float, folder: Path, commit: str | None) -> None:
    """Do one run and leave its record, or that it has diverged and where."""
    if _stop.is_set():  # it was in the queue already when the others were called off
        return
    run, started = Run(settings), time.process_time()
    config, path = run.config, folder / "unfinished" / run.key
    fed = _data(json.dumps({"data": settings["data"], "algorithm": {"name": "fedavg"}}), config.seed)
    watch = _Watch(f"{config.algorithm.name}, seed {config.seed}", work, config.rounds)
    record: Record = {"settings": config.resolved(), "commit": commit, "diverged": None}
    try:
        result = run_config(config, out=path, resume=True, callbacks=[watch], fed=fed)
        last = result.rounds[-1]["round"]
        clients = [row for row in result.clients if row["round"] == last]
        record |= {"rounds": result.rounds, "clients": clients}
    except Diverged as error:
        found = {"round": error.round, "client": error.client, "message": str(error)}
        record |= {"rounds": watch.rows, "clients": [], "diverged": found}
    record["core_seconds"] = round(time.process_time() - started, 2)  # since the last time that it was resumed
    write_atomic(folder / f"{run.key}.json", json.dumps(record).encode())
    shutil.rmtree(path, ignore_errors=True)
