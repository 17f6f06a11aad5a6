"""What torchrun tells its processes: which of them this one is, and whether they have been started anew."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from comfedl.utils.errors import ConfigError

MARK = ".torchrun"  # in a run's folder: which call of torchrun has begun it


def started() -> bool:
    """Whether this process was started by torchrun, or as it does."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's number; 0 where there is no torchrun."""
    return int(os.environ["RANK"]) if started() else 0


def world() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"]) if started() else 1


def check_started() -> None:
    """Refuse the distributed engine in a process that knows of no others."""
    if not started():
        raise ConfigError(
            "engine is 'distributed', but this process was not started by torchrun; start it with: torchrun "
            "--standalone --nproc-per-node 2 -m comfedl run CONFIG --set engine=distributed"
        )


def mark(folder: Path) -> None:
    """Note in a run's folder which call of torchrun has begun it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        (folder / MARK).write_text(f"{os.environ['TORCHELASTIC_RUN_ID']}\n{_watcher()}\n", encoding="utf-8")


def goes_on(folder: Path) -> bool:
    """Whether torchrun has started its processes anew and a folder holds what the ones before had begun.

    Torchrun counts the starts on each host by itself, and not those that a rank's death on another host has brought: so
    the process that watches over this one is asked for as well.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not (folder / MARK).is_file():
        return False
    name, watcher, *_ = [*(folder / MARK).read_text(encoding="utf-8").splitlines(), "", ""]
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or watcher == _watcher()
    return again and name == os.environ["TORCHELASTIC_RUN_ID"]


def _watcher() -> str:
    """The process that has started this one, by host, number and, where that can be had, the time it began."""
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        begun = ""
    return f"{socket.gethostname()} {parent} {begun}"
