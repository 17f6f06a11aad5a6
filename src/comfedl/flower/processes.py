"""Flower's processes on this machine, tagged by an environment variable so that their descendants can be found too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from comfedl.utils.errors import DaemonError

TAG = "COMFEDL_TRIAL"  # inherited by everything that these processes start
GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class Daemons:
    """Processes that are all stopped when the ``with`` block ends, for whatever reason."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag = folder, secrets.token_hex(8)
        self._started: list[subprocess.Popen[bytes]] = []
        self._by_name: dict[str, subprocess.Popen[bytes]] = {}  # the latest of each name
        home = folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            # Flower starts its own programs by name, so they must be on the path.
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # by default a second
            TAG: self.tag,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], folder: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process that writes to NAME.log, in a session of its own, so that Ctrl-C does not reach it."""
        program = Path(sysconfig.get_path("scripts")) / command[0]
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [str(program) if program.exists() else command[0], *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                cwd=folder or self.folder,
            )
        self._started.append(process)
        self._by_name[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def check(self, *names: str) -> None:
        """Raise an error if one of these has ended."""
        for name in names:
            code = self._by_name[name].poll()
            if code is not None:
                raise DaemonError(f"{name} ended with code {code}; its log ends with: {self.log_tail(name)}")

    def log_tail(self, name: str) -> str:
        log = self.log(name)
        lines = log.read_text("utf-8", errors="replace").strip().splitlines() if log.exists() else []
        return " | ".join(line.strip() for line in lines[-8:]) or "nothing"

    def pids(self) -> list[int]:
        """All tagged processes, including descendants."""
        wanted, found = f"{TAG}={self.tag}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def stop(self) -> None:
        """Stop everything; another Ctrl-C or SIGTERM does not interrupt this."""
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM) if main}
        try:
            for signum, grace in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 10 * GRACE)):
                end = time.monotonic() + grace
                self._signal(signum)
                while self._alive() and time.monotonic() < end:
                    time.sleep(0.1)
                    if signum == signal.SIGKILL:  # a process may just have started another
                        self._signal(signum)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self, name: str) -> None:
        """Terminate one process and wait for it."""
        process = self._by_name.pop(name)
        process.terminate()
        process.wait()

    def kill(self, name: str) -> None:
        """Kill a process and its descendants at once, as a power cut would."""
        process = self._by_name.pop(name)
        descendants = [pid for pid in self.pids() if _descends(pid, process.pid)]
        for pid in (process.pid, *descendants):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def _signal(self, number: int) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
        for pid in self.pids():  # some start new sessions
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _alive(self) -> bool:
        running = [process for process in self._started if process.poll() is None]  # a list: poll() reaps every zombie
        return bool(running or self.pids())


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def _die_with_parent() -> None:
    """In the child, before exec: ask Linux for a SIGTERM when the parent dies, even by SIGKILL."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return pid == ancestor


def free_ports(count: int) -> list[int]:
    """Ports that are free at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
