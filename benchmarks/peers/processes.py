"""CPU time and memory of a process and its descendants, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path


def cpu_seconds(tree: bool) -> float:
    """CPU seconds of this process, with ``tree`` including descendants, running or reaped."""
    if not tree:
        return time.process_time()
    return sum(sum(int(field) for field in stat[11:15]) for stat in _stats()) / os.sysconf("SC_CLK_TCK")


def peak_mb(tree: bool) -> float:
    """Peak resident memory; with ``tree`` the sum over the process and its descendants."""
    pids = descendants(os.getpid()) if tree else []
    return sum(_peak_kb(pid) for pid in [os.getpid(), *pids]) / 1024


def descendants(root: int) -> list[int]:
    """The pids of all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(place.name))
        if stat:
            parents.setdefault(int(stat[1]), []).append(int(place.name))
    found, waiting = [], [root]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _stats() -> list[list[str]]:
    return [stat for pid in [os.getpid(), *descendants(os.getpid())] if (stat := _stat(pid))]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _peak_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
