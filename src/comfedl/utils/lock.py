"""A lock that lets one process at a time write to a folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO

from comfedl.utils.errors import RunFolderError

try:
    import fcntl
except ImportError:  # Windows has no flock, so folders are not locked there
    fcntl = None  # type: ignore[assignment]

SUPPORTED = fcntl is not None


def take_lock(path: Path) -> IO[str] | None:
    """Lock a folder against other runs; the system releases the lock when the process ends, even if it is killed."""
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
    """Unlock a folder."""
    if lock is not None:
        with contextlib.suppress(OSError):
            (path / ".lock").unlink()
        lock.close()
