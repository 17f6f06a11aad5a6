"""What torchrun tells its processes: which of them this one is, and whether they have been started anew."""

from __future__ import annotations

import os
from pathlib import Path

from comfedl.errors import ConfigError

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
        (folder / MARK).write_text(os.environ["TORCHELASTIC_RUN_ID"], encoding="utf-8")


def goes_on(folder: Path) -> bool:
    """Whether torchrun has started its processes anew and a folder holds what the ones before had begun."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0 or not (folder / MARK).is_file():
        return False
    return (folder / MARK).read_text(encoding="utf-8") == os.environ.get("TORCHELASTIC_RUN_ID")
