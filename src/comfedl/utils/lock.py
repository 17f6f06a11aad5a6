"""A lock that lets one process at a time write to a folder.

The lock file stays where it is. Were it removed and made anew, two processes could each hold a lock on a file of that
name; so whoever has locked it checks that the file is still the one in the folder.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO

from comfedl.utils.errors import RunFolderError

try:
    import fcntl
except ImportError:  # Windows has no flock, so folders are not locked there
    fcntl = None  # type: ignore[assignment]

SUPPORTED = fcntl is not None
NAME = ".lock"
TRIES, PAUSE = 5, 0.05  # a reader that looks whether a run goes on holds the lock for an instant


def take_lock(path: Path, name: str = NAME) -> IO[str] | None:
    """Lock a folder against other runs; the system releases the lock when the process ends, even if it is killed.

    Locks of another ``name`` do not count: they are for a part of the folder.
    """
    if fcntl is None:
        return None
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        lock = (path / name).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if still_locked(path, lock, name):
            return lock
        lock.close()  # the folder was replaced in between
    raise RunFolderError(f"{path} is being written by another run; wait for it, or give another --out.")


def still_locked(path: Path, lock: IO[str] | None, name: str = NAME) -> bool:
    """Whether this lock is on the folder that is there now, and not on one that was removed or moved away."""
    if lock is None:
        return fcntl is None
    try:
        ours, there = os.fstat(lock.fileno()), os.stat(path / name)
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def is_locked(path: Path) -> bool:
    """Whether a process is writing to this folder; where locks are not supported, always."""
    if fcntl is None:
        return True
    try:
        with (path / NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock file, or it is not ours to read
        return False
    return False


def release_lock(path: Path, lock: IO[str] | None, remove: bool = False) -> None:
    """Unlock a folder; ``remove`` the file as well if the folder holds nothing that needs it any more."""
    if lock is None:
        return
    if remove and still_locked(path, lock):
        (path / NAME).unlink(missing_ok=True)
    lock.close()
