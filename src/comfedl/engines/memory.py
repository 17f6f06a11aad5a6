"""Memory that a round has used is kept for the next one.

By default glibc gives freed memory back to the system at once, and a round of many clients asks for it again page by
page: on 1,000 clients of a small model that is a seventh of the round.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

# mallopt's numbers for its parameters, and what it takes at most for the second.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_MMAP = 32 * 2**20
# Who has chosen for themselves: these are read by glibc when the process starts.
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@cache
def keep(size: int) -> bool:
    """Have this process keep up to ``size`` bytes that it has freed; gives whether that could be asked for."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in CHOSEN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # The first also ends glibc's own choice of the second, which must then be as large as that would become.
    return bool(mallopt(M_TRIM_THRESHOLD, min(size, 2**31 - 1)) and mallopt(M_MMAP_THRESHOLD, MOST_MMAP))
