"""The driver's side: starts the workers, lets them take turns, and keeps what they say."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import descendants
from benchmarks.peers.roster import PEERS

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How to measure: turns for each peer, the CPU seconds that a turn aims at, the limit of a start and of a turn."""

    repeats: int = 7
    seconds: float = 1.0
    limit: float = 300.0
    core: int | None = None


class Lost(Exception):
    """A worker that gave no answer: says why."""


class Late(Lost):
    """A worker that gave no answer within the limit."""


class Worker:
    """A peer's process, spoken to line by line."""

    def __init__(self, python: Path, peer: str, work: str, plan: Plan) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True)
        self.log = Path(self.scratch.name) / "log"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": self.scratch.name}
        command = [str(python), "-m", "benchmarks.peers.worker", peer, work]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command if plan.core is None else [*command, str(plan.core)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.limit = plan.limit
        self.children: list[int] = []

    def ask(self, order: str | None = None) -> dict[str, Any]:
        """Send an order, if any, and wait for the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            if order is not None:
                self.process.stdin.write(f"{order}\n".encode())
                self.process.stdin.flush()
        except BrokenPipeError:
            raise Lost(self._why()) from None
        # A worker writes one line and then waits, so nothing is left in the buffer when the next answer is awaited.
        if not select.select([self.process.stdout], [], [], self.limit)[0]:
            raise Late(f"in {self.limit:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise Lost(self._why())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _why(self) -> str:
        code = self.process.wait(timeout=10)
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"its process ended with {code}: {lines[-1] if lines else 'no message'}"

    def stop(self) -> dict[str, Any]:
        """Let the process end by itself, and give what it says at last."""
        self.children = descendants(self.process.pid)  # Ray's daemons outlive the process that has started them
        return self.ask("stop")

    def close(self) -> None:
        """End the process and whatever it has started."""
        for pid in self.children or descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()
        self.scratch.cleanup()


def measure(
    works: Sequence[str], peers: Sequence[str], plan: Plan, python: Callable[[str], Path]
) -> dict[str, dict[str, Record]]:
    """The record of each peer on each of these workloads, with its samples or with the reason why there are none.

    All of them take turns, so that works can be compared with one another, and not only peers on one work.
    """
    records: dict[str, dict[str, Record]] = {work: {} for work in works}
    workers: dict[tuple[str, str], Worker] = {}
    try:
        for peer, work in product(peers, works):  # so that a peer's works are next to one another in a turn
            record: Record = {"status": "ok", "samples": [], "note": PEERS[peer].notes.get(work, "")}
            records[work][peer] = record
            if work in PEERS[peer].lacks:
                record |= {"status": "lacks", "note": PEERS[peer].lacks[work]}
                continue
            say(f"{work} {peer}: starting")
            try:
                worker = workers[work, peer] = Worker(python(peer), peer, work, plan)
                record |= worker.ask()
            except Exception as error:  # whatever keeps one peer from it, the others go on
                lose(work, peer, record, workers, error, "no second round")
        for repeat in range(plan.repeats):
            say(f"{', '.join(works)}: turn {repeat + 1} of {plan.repeats}")
            order = list(dict.fromkeys(peer for _, peer in workers))
            turn = repeat % max(len(order), 1)
            for peer, work in product(order[turn:] + order[:turn], works):
                if (work, peer) not in workers:
                    continue
                record = records[work][peer]
                rounds = max(1, math.ceil(plan.seconds / max(record["round_s"], 1e-6)))
                try:
                    record["samples"].append({"turn": repeat, **workers[work, peer].ask(f"go {rounds}")})
                except Exception as error:
                    lose(work, peer, record, workers, error, f"no end of turn {repeat + 1}")
        for work, peer in list(workers):
            try:
                records[work][peer] |= workers[work, peer].stop()
            except Lost as error:
                lose(work, peer, records[work][peer], workers, error, "no end")
    finally:
        for worker in workers.values():
            worker.close()
    return records


def lose(
    work: str, peer: str, record: Record, workers: dict[tuple[str, str], Worker], error: Exception, what: str
) -> None:
    """Note why a peer has no (more) samples, and end its process."""
    late = isinstance(error, Late)
    record |= {"status": "late", "note": f"{what} {error}"} if late else {"status": "failed", "note": str(error)}
    say(f"{work} {peer}: {record['note']}")
    if (work, peer) in workers:
        workers.pop((work, peer)).close()


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
