"""Flower's processes on this machine: they bear a mark by which they, and what they start, are found again."""

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

from comfedl.utils.errors import ComfedlError

MARK = "COMFEDL_TRIAL"
PATIENCE = 5.0  # seconds that a process has to end by itself


class DaemonError(ComfedlError, RuntimeError):
    """A process of Flower's that did not start, or ended too early."""


class Daemons:
    """Processes that are all gone when the block ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, secrets.token_hex(8)
        self._started: list[subprocess.Popen[bytes]] = []
        self._named: dict[str, subprocess.Popen[bytes]] = {}  # the last one of each name
        home = folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            # Flower starts its own programs by name.
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            MARK: self.mark,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], folder: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process, in this folder, whose output goes to NAME.log; Ctrl-C in the terminal is not its."""
        program = Path(sysconfig.get_path("scripts")) / command[0]
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [str(program) if program.exists() else command[0], *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_ends_with_us,
                cwd=folder or self.folder,
            )
        self._started.append(process)
        self._named[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def check(self, *names: str) -> None:
        """See that these are still running."""
        for name in names:
            code = self._named[name].poll()
            if code is not None:
                raise DaemonError(f"{name} has ended with code {code}; its last words: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        lines = (
            self.log(name).read_text("utf-8", errors="replace").strip().splitlines() if self.log(name).exists() else []
        )
        return " | ".join(line.strip() for line in lines[-8:]) or "none"

    def pids(self) -> list[int]:
        """All processes that bear the mark, whoever has started them."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def stop(self) -> None:
        """End everything; another Ctrl-C or SIGTERM meanwhile does not keep it from that."""
        ours = (signal.SIGINT, signal.SIGTERM) if _in_main_thread() else ()
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ours}
        try:
            for signum, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, 10 * PATIENCE)):
                until = time.monotonic() + patience
                self._tell(signum)
                while self._alive() and time.monotonic() < until:
                    time.sleep(0.1)
                    if signum == signal.SIGKILL:  # a process may just have started another
                        self._tell(signum)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self, name: str) -> None:
        """Ask one process to end, and see that it does."""
        process = self._named.pop(name)
        process.terminate()
        process.wait()

    def kill(self, name: str) -> None:
        """End a process and all that it has started at once, as a power cut would."""
        process = self._named.pop(name)
        below = [pid for pid in self.pids() if _descends(pid, process.pid)]
        for pid in (process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def _tell(self, number: int) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
        for pid in self.pids():  # some start sessions of their own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _alive(self) -> bool:
        # poll() also takes note of those that have ended: until then they are there, for those who ask the system.
        running = [process for process in self._started if process.poll() is None]
        return bool(running or self.pids())


def _linux() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


_LIBC = _linux()
_PR_SET_PDEATHSIG = 1


def _ends_with_us() -> None:
    """In a process that begins: ask Linux to end it when its parent is killed and cannot do so itself."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return pid == ancestor


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
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
