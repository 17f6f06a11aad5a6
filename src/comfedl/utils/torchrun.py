"""What torchrun passes to its processes by environment variables: the rank, and whether it has restarted them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from comfedl.utils.errors import ConfigError

LAUNCH_FILE = ".torchrun"  # in a run folder: the torchrun launch that created it


def started() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """The rank of this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if started() else 0


def world_size() -> int:
    """The number of processes; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if started() else 1


def check_started() -> None:
    """Raise an error if this process was not started by torchrun."""
    if not started():
        raise ConfigError(
            "engine is 'distributed', but this process was not started by torchrun; start it with: torchrun "
            "--standalone --nproc-per-node 2 -m comfedl run CONFIG --set engine=distributed"
        )


def record_launch(folder: Path) -> None:
    """Record in a run folder which torchrun launch has created it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        (folder / LAUNCH_FILE).write_text(f"{os.environ['TORCHELASTIC_RUN_ID']}\n{_agent()}\n", encoding="utf-8")


def is_restart(folder: Path) -> bool:
    """Whether torchrun has restarted its processes and the folder holds the run that they had begun.

    TORCHELASTIC_RESTART_COUNT is kept per host and misses restarts caused by a failure on another host, so an unchanged
    parent process (torchrun's agent) counts as a restart as well.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not (folder / LAUNCH_FILE).is_file():
        return False
    launch, agent, *_ = [*(folder / LAUNCH_FILE).read_text(encoding="utf-8").splitlines(), "", ""]
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or agent == _agent()
    return restarted and launch == os.environ["TORCHELASTIC_RUN_ID"]


def _agent() -> str:
    """The parent process: host, process id and, where /proc exists, start time, since ids are reused."""
    parent = os.getppid()
    try:
        start = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start = ""
    return f"{socket.gethostname()} {parent} {start}"
