"""Runs many configs over several processes; each finished run is one file and is never repeated.

A run is a config with its seed. Its file is named by a hash of all values, so that figures share runs. A killed run
resumes from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from multiprocessing.sharedctypes import Synchronized, SynchronizedString
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from comfedl.config.schema import Config, parse_config, run_config
from comfedl.core.client_statistics import Row
from comfedl.data.federated import FederatedData
from comfedl.training.callbacks import Callback
from comfedl.training.progress import TwoLines, emit, seen
from comfedl.utils.errors import Diverged
from comfedl.utils.files import write_atomic
from comfedl.utils.process_pool import SPAWN, init_worker, process_pool, sigterm_as_interrupt

Record = dict[str, Any]

STATUS_BYTES = 400  # size of the shared buffer for the status line


@dataclass(frozen=True)
class FigureRun:
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
        """An estimate of the cost, in local steps."""
        algorithm = self.config.make_algorithm()
        passes = 2 if hasattr(algorithm, "adapt_lr") or hasattr(algorithm, "lam") else 1
        return self.config.rounds * (algorithm.local_steps * passes + 1)


class Runner:
    """Runs what is not finished yet and returns the records of all runs."""

    def __init__(self, folder: Path, jobs: int, commit: str | None = None, log: str = "bar") -> None:
        self.folder, self.jobs, self.commit, self.log = folder, jobs, commit, log
        self.done = 0

    def record(self, run: FigureRun) -> Record | None:
        """The record of a finished run; None if it is not finished."""
        path = self.folder / f"{run.key}.json"
        if not path.exists():
            return None
        found: Record = json.loads(path.read_text(encoding="utf-8"))
        return found

    def run(self, runs: Sequence[FigureRun], label: str) -> dict[str, Record]:
        """The records of these runs by key; missing ones are run first, in this order."""
        unique = {run.key: run for run in runs}
        missing = [run for run in unique.values() if self.record(run) is None]
        if missing:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._run_missing(missing, label)
            self.done += len(missing)
        records = {key: self.record(run) for key, run in unique.items()}
        return {key: record for key, record in records.items() if record is not None}

    def _run_missing(self, runs: Sequence[FigureRun], label: str) -> None:
        stop, steps = SPAWN.Event(), SPAWN.Value("d", 0.0)
        status = cast(SynchronizedString, SPAWN.Array("c", STATUS_BYTES))
        jobs = min(self.jobs, len(runs))
        threads = max(1, (os.cpu_count() or 1) // jobs)
        shared = (threads, stop, steps, status)
        with sigterm_as_interrupt(), process_pool(jobs, _start_worker, shared) as pool:
            try:
                with _progress_bar(label, sum(run.work for run in runs), self.log) as show:
                    futures = [pool.submit(_do_run, run.settings, run.work, self.folder, self.commit) for run in runs]
                    waiting: set[Future[None]] = set(futures)
                    while waiting:
                        ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                        for future in ended:
                            future.result()
                        line = status.value.decode(errors="ignore")
                        show(steps.value, len(futures) - len(waiting), len(futures), line)
            finally:
                stop.set()  # before the pool waits for its workers


@contextmanager
def _progress_bar(label: str, total: float, log: str) -> Iterator[Any]:
    """A bar over all runs with the time left and a status line; silent without a terminal."""
    console, reported = Console(stderr=True), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[runs]}"))
    with TwoLines(
        *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console,
        disable=log == "json" or not console.is_terminal, speed_estimate_period=300,
    ) as bar:  # fmt: skip
        task = bar.add_task(label, total=total, runs="")

        def show(steps: float, done: int, runs: int, status: str) -> None:
            nonlocal reported
            bar.said = status
            bar.update(task, completed=steps, runs=f"{done} of {runs} runs")
            if log == "json" and done > reported:
                emit("runs", of=label, done=done, runs=runs, share=round(steps / total, 4))
                reported = done

        yield show


# In the workers.

_stop: Event
_steps: Synchronized[float]
_status: SynchronizedString


def _start_worker(threads: int, stop: Event, steps: Synchronized[float], status: SynchronizedString) -> None:
    global _stop, _steps, _status
    _stop, _steps, _status = stop, steps, status
    init_worker(threads)


class _RunMonitor(Callback):
    """Counts rounds for the progress bar, collects the rows, and stops the run when the parent asks to."""

    def __init__(self, label: str, work: float, rounds: int) -> None:
        self.label = label
        self.rows: list[Row] = []
        self.steps_per_round, self.counted, self.rounds = work / rounds, 0, rounds

    def round_done(self, number: int) -> None:
        with _steps.get_lock():
            _steps.value += self.steps_per_round * (number - self.counted)
        self.counted = number
        if _stop.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # which the run handles: it writes a checkpoint and stops

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        self.rows.append(row)
        status = f"{self.label}, round {row['round']}/{self.rounds}; {seen(row, clients) or ''}"
        _status.value = status.encode()[: STATUS_BYTES - 1]


@lru_cache(maxsize=1)
def _data(table: str, seed: int) -> FederatedData:
    """The data, cached because the next run often uses the same."""
    return parse_config({**json.loads(table), "seed": seed}).make_data()


def _do_run(settings: Mapping[str, Any], work: float, folder: Path, commit: str | None) -> None:
    """Do one run and write its record, which may be that it diverged."""
    if _stop.is_set():  # the pool had already queued it when the rest was cancelled
        return
    run, started = FigureRun(settings), time.process_time()
    config, path = run.config, folder / "unfinished" / run.key
    fed = _data(json.dumps({"data": settings["data"], "algorithm": {"name": "fedavg"}}), config.seed)
    monitor = _RunMonitor(f"{config.algorithm.name}, seed {config.seed}", work, config.rounds)
    record: Record = {"settings": config.resolved(), "commit": commit, "diverged": None}
    try:
        result = run_config(config, out=path, resume=True, callbacks=[monitor], fed=fed)
        last = result.rounds[-1]["round"]
        clients = [row for row in result.clients if row["round"] == last]
        record |= {"rounds": result.rounds, "clients": clients}
    except Diverged as error:
        found = {"round": error.round, "client": error.client, "message": str(error)}
        record |= {"rounds": monitor.rows, "clients": [], "diverged": found}
    record["core_seconds"] = round(time.process_time() - started, 2)  # since the last resume
    write_atomic(folder / f"{run.key}.json", json.dumps(record).encode())
    shutil.rmtree(path, ignore_errors=True)
