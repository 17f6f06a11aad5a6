"""Memory that a round has used is kept for the next one, in large pages.

By default glibc gives freed memory back to the system at once, and a round of many clients asks for it again page by
page: on 1,000 clients of a small model that is a seventh of the round. And where a system gives large pages to those
who ask for them, a processor finds its way through many tensors sooner with these.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

# mallopt's numbers for its parameters, and what it takes at most for the second.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_MMAP = 32 * 2**20
# madvise's: large pages from now on, and for what is there already (Linux 6.1; elsewhere it is refused).
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE_PAGE = 2 * 2**20
# Who has chosen for themselves: these are read by glibc when the process starts.
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@cache
def keep(size: int) -> bool:
    """Have this process keep up to ``size`` bytes that it has freed; gives whether that could be asked for."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in CHOSEN):
        return False
    libc, size = ctypes.CDLL(None), min(size, 2**31 - 1)
    # The first also ends glibc's own choice of the second, which must then be as large as that would become.
    kept = bool(libc.mallopt(M_TRIM_THRESHOLD, size) and libc.mallopt(M_MMAP_THRESHOLD, MOST_MMAP))
    if kept and LARGE_PAGES.is_file() and "[madvise]" in LARGE_PAGES.read_text():
        _grow(libc, size * 3 // 4)  # not all of it, or it would be given back
        _enlarge_pages(libc)
    return kept


def _grow(libc: ctypes.CDLL, size: int) -> None:
    """Have so many free bytes in the heap. They are addresses: they take no memory before they are written on."""
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    block = MOST_MMAP // 2
    for start in [libc.malloc(block) for _ in range(size // block)]:
        libc.free(start)


def _enlarge_pages(libc: ctypes.CDLL) -> None:
    """Ask for large pages in the heap as it is."""
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            first, end = (int(address, 16) for address in line.split()[0].split("-"))
            first, end = -(-first // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
            if first < end:
                libc.madvise(first, end - first, MADV_HUGEPAGE)
                libc.madvise(first, end - first, MADV_COLLAPSE)
