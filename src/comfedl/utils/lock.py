"""A folder that one process writes at a time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO

from comfedl.utils.errors import RunFolderError

try:
    import fcntl
except ImportError:  # Windows has no flock: there a folder is not locked
    fcntl = None  # type: ignore[assignment]


KNOWN = fcntl is not None  # whether a folder that is being written has a lock


def take_lock(path: Path) -> IO[str] | None:
    """Keep other runs out of a folder; the system lets go of the lock when the process ends, however it ends."""
    if fcntl is None:
        return None
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunFolderError(f"{path} is being written by another run; wait for it, or give another --out.") from None
    return lock


def release_lock(path: Path, lock: IO[str] | None) -> None:
    """Let others into a folder again."""
    if lock is not None:
        with contextlib.suppress(OSError):
            (path / ".lock").unlink()
        lock.close()
