"""Random runs of every method, stopped in every way at random instants: each must end as the run that nothing stopped.

    python -m benchmarks.soak --minutes 60

A case draws a config and trains it once without disturbance. Then it is trained again, and killed (SIGKILL), stopped
(SIGINT, SIGTERM), left without room on the disk, or damaged in its newest checkpoint, several times, with ``--resume``
in between; at the end it must have the same records and models, to the bit. After each disturbance the checkpoints
that were whole are still there, a model that was checkpointed can be evaluated, and nothing has printed a traceback.
Cases run in one process, under torchrun (where a rank is killed as well), and over Flower's SuperLink and SuperNodes.

One line a case goes to the standard output, failures with what was said; the last line has the counts. Needs Linux; as
root the disk is a small one of its own, otherwise a limit on the size of files takes its place.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.random_configs import draw_config
from comfedl.cli.main import main
from comfedl.utils.toml import to_toml

PATIENCE = 60.0  # seconds that one process may take
DISK = 64  # megabytes
SAME = ("config.toml", "rounds.jsonl", "clients.jsonl", "summary.json", "model.safetensors")
# The share of the time that each engine gets.
ENGINES = {"embedded": 0.65, "distributed": 0.2, "flower": 0.15}
SIGNALS = {"killed": signal.SIGKILL, "interrupted": signal.SIGINT, "terminated": signal.SIGTERM}


class Broken(Exception):
    """A promise that did not hold."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    said: str
    seconds: float


@dataclass
class Disk:
    """The folder of a case, on a small disk of its own if this process may mount one."""

    folder: Path
    mounted: bool = False

    def __enter__(self) -> Disk:
        self.folder.mkdir()
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            asked = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(self.folder)]
            subprocess.run(asked, check=True, capture_output=True)
            self.mounted = True
        return self

    def __exit__(self, *error: object) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    @contextlib.contextmanager
    def filled(self, left: int) -> Iterator[int | None]:
        """Leave this many bytes free. Without a disk of its own: the largest file that a process may write."""
        if not self.mounted:
            yield left
            return
        ballast = self.folder / "ballast"
        free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - left))
        try:
            yield None
        finally:
            ballast.unlink()


# Processes.


def said(folder: Path) -> Path:
    """Where a process writes what it says: not on the disk that is filled."""
    return folder.with_name(f"{folder.name}.said")


def call(folder: Path, *arguments: str, after: tuple[float, int] | None = None, limit: int | None = None) -> Ended:
    """The command line in a process of its own, which may be sent a signal after some seconds."""
    began = time.perf_counter()
    log = said(folder)
    pid = os.fork()
    if pid == 0:
        _child(folder, log, arguments, limit)
    code = _wait(pid, began, after)
    return Ended(code, log.read_text(errors="replace"), time.perf_counter() - began)


def _child(folder: Path, log: Path, arguments: Sequence[str], limit: int | None) -> None:
    code = 99
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sys.argv = ["comfedl", *arguments]
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
    except BaseException as error:
        with contextlib.suppress(OSError):
            print(f"Traceback: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _wait(pid: int, began: float, after: tuple[float, int] | None) -> int:
    """Wait for a process's end; send it the signal meanwhile."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        passed = time.perf_counter() - began
        if after is not None and passed > after[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, after[1])
            after = None
        if passed > PATIENCE:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Broken(f"no end after {PATIENCE:.0f} s")
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


# What must hold.


def contents(out: Path) -> dict[str, bytes]:
    """What two runs must have in common. The seconds they took are not among it."""
    found = {name: (out / name).read_bytes() for name in SAME}
    summary = json.loads(found["summary.json"])
    summary.pop("seconds", None)
    found["summary.json"] = json.dumps(summary, sort_keys=True).encode()
    for folder in ("personal", "sites"):
        for path in sorted((out / folder).rglob("*")) if folder == "personal" else ():
            found[str(path.relative_to(out))] = path.read_bytes() if path.is_file() else b""
    return found


def checkpoints(out: Path) -> dict[int, str]:
    """The whole checkpoints of a run, by round, with a digest."""
    found = {}
    for folder in (out / "checkpoint").glob("round-*") if (out / "checkpoint").is_dir() else ():
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(b"".join((folder / n).read_bytes() for n in ("meta.json", "tensors.safetensors")))
            found[int(folder.name[6:])] = digest.hexdigest()
    return found


def expect(condition: bool, complaint: str, ended: Ended | None = None) -> None:
    if not condition:
        said = "" if ended is None else f"; exit code {ended.code}: {ended.said.strip()[-600:]}"
        raise Broken(complaint + said)


def check_end(ended: Ended, codes: Sequence[int]) -> None:
    """One of these exit codes, at most one error, and never a traceback."""
    expect(ended.code in codes, f"expected exit code {' or '.join(map(str, codes))}", ended)
    expect("Traceback" not in ended.said, "a traceback", ended)
    expect(ended.code != 2 or "error: " in ended.said, "an exit without an error", ended)


def _reason(ended: Ended) -> str:
    return ended.said.partition("error: ")[2].strip()[:120]


# Cases.


@dataclass
class Case:
    """One config, and what was done to its run."""

    number: int
    engine: str
    draw: random.Random
    disk: Disk
    done: Counter[str] = field(default_factory=Counter)
    title: str = ""

    @property
    def folder(self) -> Path:
        return self.disk.folder

    def run(self) -> str:
        """ "equal", or how the undisturbed run ended if that was not with a model."""
        return {"embedded": self._embedded, "distributed": self._distributed, "flower": self._flower}[self.engine]()

    def _write(self, config: Mapping[str, Any]) -> None:
        # Two writers: arrays of tables (faults) are inline, as in a config that comfedl records.
        (self.folder / "run.toml").write_text(to_toml(config))
        method = config["algorithm"]
        self.title = f"{method['name']}, {config['data'].get('partition')}, {config['rounds']} rounds"

    # One process.

    def _embedded(self) -> str:
        self._write(draw_config(self.draw) | {"rounds": self.draw.randint(3, 25)})
        whole = call(self.folder, "run", "run.toml", "--out", "whole", "--log", "json")
        check_end(whole, (0, 2))
        if whole.code == 2:
            return self._failed(whole)
        out = self.folder / "cut"
        for _ in range(self.draw.randint(1, 4)):
            self._disturb(out, whole.seconds)
            if (out / "summary.json").exists():
                break
        ended = call(self.folder, "run", "run.toml", "--out", "cut", "--resume", "--log", "json")
        check_end(ended, (0,))
        self._compare(out, self.folder / "whole")
        return "equal"

    def _failed(self, whole: Ended) -> str:
        """A config that cannot be trained: nothing stays, or, if it had rounds, what they have come to."""
        out = self.folder / "whole"
        if not checkpoints(out):
            expect(not out.exists(), f"left behind: {[path.name for path in out.glob('*')]}", whole)
            return f"refused: {_reason(whole)}"
        return f"ended by itself: {_reason(whole)}"

    def _disturb(self, out: Path, seconds: float) -> None:
        """Start the run or go on with it, and let something happen."""
        before = checkpoints(out)
        what = self.draw.choice([*SIGNALS, "killed", "full", "damaged"])
        if what == "damaged" and len(before) < 2:
            what = "killed"
        arguments = ("run", "run.toml", "--out", "cut", "--resume", "--log", "json")
        if what == "full":
            with self.disk.filled(self.draw.choice([0, 4096, 20_000, 100_000, 400_000])) as limit:
                ended = call(self.folder, *arguments, limit=limit)
            check_end(ended, (0, 2))
            if ended.code == 2:
                expect("make room" in ended.said or "room" in ended.said, "another error than a full disk", ended)
        elif what == "damaged":
            newest = out / "checkpoint" / f"round-{max(before):09}"
            self._flip(newest / self.draw.choice(["meta.json", "tensors.safetensors"]))
            before.pop(max(before))
            after = (self.draw.uniform(0, seconds), signal.SIGTERM)
            check_end(call(self.folder, *arguments, after=after), (0, 130, -15))
        else:
            number = SIGNALS[what]
            ended = call(self.folder, *arguments, after=(self.draw.uniform(0, seconds), number))
            check_end(ended, (0, -9) if what == "killed" else (0, 130, -number))
        self.done[what] += 1
        self._check_kept(out, before)

    def _flip(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(bytes(data))

    def _check_kept(self, out: Path, before: Mapping[int, str]) -> None:
        """What was checkpointed is there, or something later is; and it can be used."""
        found = checkpoints(out)
        expect(not before or bool(found), f"the checkpoints {[*before]} are gone")
        expect(not before or max(found) >= max(before), f"checkpoint {max(before, default=0)} is gone: {[*found]}")
        if found and self.draw.random() < 0.3:
            used = call(self.folder, "evaluate", "cut")
            check_end(used, (0,))
            self.done["evaluated"] += 1

    def _compare(self, out: Path, whole: Path) -> None:
        one, other = contents(out), contents(whole)
        expect(one.keys() == other.keys(), f"different files: {sorted(one.keys() ^ other.keys())}")
        differing = [name for name, data in one.items() if data != other[name]]
        expect(not differing, f"not equal: {differing}")
        hidden = [path.name for path in out.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
        expect(not {*hidden} - {".torchrun"}, f"left behind: {hidden}")

    # Two ranks.

    def _distributed(self) -> str:
        config = draw_config(self.draw) | {"rounds": self.draw.randint(10, 40), "engine": "distributed"}
        config.pop("embedded", None)
        self._write(config | {"checkpoint_every": self.draw.randint(1, 3)})
        whole = self._torchrun("whole")
        if whole.code:
            expect("error: " in whole.said, "no error of one sentence", whole)
            return self._failed(whole)
        out = self.folder / "cut"
        for _ in range(self.draw.randint(1, 2)):
            before = checkpoints(out)
            self._torchrun("cut", "--resume", kill=self.draw.choice(["rank", "rank", "all", "stop"]))
            self._check_kept(out, before)
            if (out / "summary.json").exists():
                break
        ended = self._torchrun("cut", "--resume")
        expect(ended.code == 0, "the resumed run failed", ended)
        self._compare(out, self.folder / "whole")
        return "equal"

    def _torchrun(self, out: str, *more: str, kill: str | None = None) -> Ended:
        """Train on two ranks; kill one or all of them once there is a further checkpoint, or stop them all."""
        began = time.perf_counter()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "comfedl"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        known, log = {*checkpoints(self.folder / out)}, said(self.folder)
        with (
            log.open("w") as file,
            subprocess.Popen(
                [sys.executable, *command, "run", "run.toml", "--out", out, *more],
                **{"cwd": self.folder, "env": environment, "stdout": file, "stderr": file, "process_group": 0},
            ) as process,
        ):
            while process.poll() is None:
                if kill and {*checkpoints(self.folder / out)} - known:
                    time.sleep(self.draw.uniform(0, 0.3))
                    self._kill_ranks(process, kill)
                    kill = None
                if time.perf_counter() - began > 3 * PATIENCE:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise Broken("torchrun has not ended")
                time.sleep(0.01)
        return Ended(process.returncode, log.read_text(errors="replace"), time.perf_counter() - began)

    def _kill_ranks(self, process: subprocess.Popen[bytes], kill: str) -> None:
        ranks = children(process.pid)
        if kill == "stop":
            process.terminate()
        else:
            for rank in [self.draw.choice(ranks)] if kill == "rank" and ranks else ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        self.done[{"stop": "terminated", "rank": "rank killed", "all": "killed"}[kill]] += 1

    # Sites.

    def _flower(self) -> str:
        config = draw_config(self.draw)
        for key in ("faults", "embedded", "clients_per_round", "eval_clients"):
            config.pop(key, None)
        config["data"] = {"name": "digits", "partition": "dirichlet", "alpha": 0.5, "clients": 2}
        config["flower"] = {"deadline": 200.0, "patience": 200.0}
        self._write(config | {"rounds": self.draw.randint(2, 4), "checkpoint_every": 1})
        whole = self._local("whole", None)
        if whole.code:
            check_end(whole, (2,))
            return f"refused: {_reason(whole)}"
        out = self.folder / "cut"
        stopped = self._local("cut", self.draw.choice([signal.SIGINT, signal.SIGTERM]))
        check_end(stopped, (0, 130))
        check_end(self._local("cut", None), (0,))
        self._compare(out, self.folder / "whole")
        return "equal"

    def _local(self, out: str, number: int | None) -> Ended:
        began, log = time.perf_counter(), said(self.folder)
        asked = [sys.executable, "-m", "comfedl", "flower", "local", "run.toml", "--out", out]
        with (
            log.open("w") as file,
            subprocess.Popen(
                [*asked, "--resume"], cwd=self.folder, stdout=file, stderr=file, process_group=0
            ) as process,
        ):
            while process.poll() is None:
                if number is not None and checkpoints(self.folder / out):
                    time.sleep(self.draw.uniform(0, 10))
                    process.send_signal(number)
                    self.done["interrupted" if number == signal.SIGINT else "terminated"] += 1
                    number = None
                if time.perf_counter() - began > 10 * PATIENCE:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise Broken("flower local has not ended")
                time.sleep(0.05)
        return Ended(process.returncode, log.read_text(errors="replace"), time.perf_counter() - began)


# The soak.


def soak(minutes: float, seed: int = 0, keep: Path | None = None, engines: Sequence[str] = tuple(ENGINES)) -> Soaked:
    """Run cases until the time is over; a case that has begun is finished."""
    began, result = time.monotonic(), Soaked()
    spent = dict.fromkeys(engines, 0.0)
    while (passed := time.monotonic() - began) < 60 * minutes:
        left = minutes - passed / 60
        able = [name for name in engines if name != "flower" or left > 5] or [*engines]
        engine = min(able, key=lambda name: spent[name] / ENGINES[name])
        one = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="soak-") as outside, Disk(Path(outside) / "disk") as disk:
            case = Case(result.cases, engine, random.Random(f"{seed} {result.cases}"), disk)
            try:
                ended = case.run()
            except Broken as fault:
                ended = f"FAILED: {fault}"
                if keep is not None:
                    shutil.copytree(disk.folder, keep / str(case.number), dirs_exist_ok=True)
        spent[engine] += time.monotonic() - one
        result.add(case, ended)
    result.minutes = (time.monotonic() - began) / 60
    print(result, flush=True)
    return result


@dataclass
class Soaked:
    """The counts of a soak."""

    minutes: float = 0.0
    cases: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, case: Case, ended: str) -> None:
        self.cases += 1
        self.done.update(case.done)
        self.ended[f"{case.engine} {ended.partition(':')[0]}"] += 1
        disturbed = ", ".join(f"{what} {times}" for what, times in case.done.items()) or "undisturbed"
        line = f"{case.number}: {case.engine}: {case.title}: {disturbed}: {ended}"
        if ended.startswith("FAILED"):
            self.failures.append(line)
        print(line, flush=True)

    def __str__(self) -> str:
        done = ", ".join(f"{times} {what}" for what, times in sorted(self.done.items()))
        ended = ", ".join(f"{times} {how}" for how, times in sorted(self.ended.items()))
        return f"{self.minutes:.1f} minutes, {self.cases} runs ({ended}); {done}; {len(self.failures)} failures"


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--keep", type=Path, help="a folder for the files of runs that failed")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that were started do not survive a fork
    sys.exit(bool(soak(asked.minutes, asked.seed, asked.keep, asked.engines).failures))


if __name__ == "__main__":
    run()
