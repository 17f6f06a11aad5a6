"""The driver: starts the workers, lets them take turns, and collects their measurements."""

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
    """How to measure: turns per peer, target CPU seconds per turn, time limit of a start or a turn, core to pin to."""

    repeats: int = 7
    seconds: float = 1.0
    limit: float = 300.0
    core: int | None = None
    before: Path | None = None
    """A checkout of another commit, for the peer "before"."""


class Lost(Exception):
    """A worker did not answer; the message says why."""


class Late(Lost):
    """A worker did not answer within the time limit."""


class Worker:
    """A peer's process, which exchanges lines with the driver."""

    def __init__(self, python: Path, peer: str, work: str, plan: Plan) -> None:
        root = ROOT if peer != "before" or plan.before is None else plan.before
        peer = "ours" if peer == "before" else peer
        self.scratch = tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True)
        self.log = Path(self.scratch.name) / "log"
        paths = [str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": self.scratch.name}
        command = [str(python), "-m", "benchmarks.peers.worker", peer, work]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command if plan.core is None else [*command, str(plan.core)],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.limit = plan.limit
        self.children: list[int] = []

    def ask(self, command: str | None = None) -> dict[str, Any]:
        """Send a command, if any, and wait for the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            if command is not None:
                self.process.stdin.write(f"{command}\n".encode())
                self.process.stdin.flush()
        except BrokenPipeError:
            raise Lost(self._why()) from None
        # A worker writes one line and then waits, so the buffer is empty when select() is called.
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
        """Let the process end by itself, and return its last answer."""
        self.children = descendants(self.process.pid)  # Ray's daemons outlive the process that started them
        return self.ask("stop")

    def close(self) -> None:
        """Kill the process and its descendants."""
        for pid in self.children or descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()
        self.scratch.cleanup()


def measure(
    works: Sequence[str], peers: Sequence[str], plan: Plan, python: Callable[[str], Path]
) -> dict[str, dict[str, Record]]:
    """The record of each peer on each workload: its samples, or the reason why there are none.

    All take turns, so that workloads can be compared with one another, not only the peers on one workload.
    """
    records: dict[str, dict[str, Record]] = {work: {} for work in works}
    workers: dict[tuple[str, str], Worker] = {}
    try:
        for peer, work in product(peers, works):  # a peer's workloads run one after another within a turn
            record: Record = {"status": "ok", "samples": [], "note": PEERS[peer].notes.get(work, "")}
            records[work][peer] = record
            if work in PEERS[peer].lacks:
                record |= {"status": "lacks", "note": PEERS[peer].lacks[work]}
                continue
            log(f"{work} {peer}: starting")
            try:
                worker = workers[work, peer] = Worker(python(peer), peer, work, plan)
                record |= worker.ask()
            except Exception as error:  # the other peers continue
                drop(work, peer, record, workers, error, "no second round")
        for repeat in range(plan.repeats):
            log(f"{', '.join(works)}: turn {repeat + 1} of {plan.repeats}")
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
                    drop(work, peer, record, workers, error, f"no end of turn {repeat + 1}")
        for work, peer in list(workers):
            try:
                records[work][peer] |= workers[work, peer].stop()
            except Lost as error:
                drop(work, peer, records[work][peer], workers, error, "no end")
    finally:
        for worker in workers.values():
            worker.close()
    return records


def drop(
    work: str, peer: str, record: Record, workers: dict[tuple[str, str], Worker], error: Exception, what: str
) -> None:
    """Record why a peer has no (more) samples, and kill its process."""
    late = isinstance(error, Late)
    record |= {"status": "late", "note": f"{what} {error}"} if late else {"status": "failed", "note": str(error)}
    log(f"{work} {peer}: {record['note']}")
    if (work, peer) in workers:
        workers.pop((work, peer)).close()


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
