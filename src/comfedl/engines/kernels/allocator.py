"""Memory that a round has used is kept for the next one, and that of the main thread in large pages.

By default glibc gives freed memory back to the system at once, and a round of many clients asks for it again page by
page: on 1,000 clients of a small model that is a seventh of the round. And where a system gives large pages to those
who ask for them, a processor finds its way through many tensors sooner with these.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

# mallopt's numbers for its parameters, and what it takes at most for the second.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_MMAP = 32 * 2**20
LEAST = 128 * 2**10  # what glibc keeps without being asked
# madvise's: large pages from now on, and for what is there already (Linux 6.1; elsewhere it is refused).
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
LARGE_PAGE = 2 * 2**20
# How much of the heap large pages are asked for ahead, how much memory they may take that nobody has asked for, and up
# to which size a heap is made into large pages at once, which takes a second for some gigabytes.
AHEAD, SPARE, AT_ONCE = 256 * 2**20, 32 * 2**20, 2**30
# Who has chosen for themselves: these are read by glibc when the process starts.
CHOSEN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_PERTURB_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)

# What has been asked for in this process, and for how much of it large pages.
_most, _most_large = 0, 0


def keep_freed_memory(size: int) -> bool:
    """Have this process keep up to ``size`` bytes that it has freed; gives whether that could be asked for.

    Of several sizes the largest counts.
    """
    global _most, _most_large
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in CHOSEN):
        return False
    libc, size = ctypes.CDLL(None), min(max(size, LEAST), 2**31 - 1)
    if size > _most:
        # The first also ends glibc's own choice of the second, which must then be as large as that would become.
        if not (libc.mallopt(M_TRIM_THRESHOLD, size) and libc.mallopt(M_MMAP_THRESHOLD, MOST_MMAP)):
            return False
        _most = size
    if size > _most_large and threading.current_thread() is threading.main_thread():  # whose memory is the heap
        _most_large = size
        with suppress(OSError):  # without /proc or /sys it is done without
            if large_pages_wait():
                _enlarge(libc, size)
    return True


def large_pages_wait() -> bool:
    """Whether this system has large pages of 2 MB for those who ask, and for nobody else."""
    if not LARGE_PAGES.is_dir() or b"[madvise]" not in (LARGE_PAGES / "enabled").read_bytes():
        return False
    return int((LARGE_PAGES / "hpage_pmd_size").read_bytes()) == LARGE_PAGE


def _enlarge(libc: ctypes.CDLL, size: int) -> None:
    """Large pages for what the heap grows by next, and for the heap as it is if all of it is this process's own memory.

    One with holes would be filled, by the system in the background as well, and of one that is shared with the process
    that this one was forked from there would be a copy.
    """
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first, end, own = _heap()
    whole = end - first - own <= SPARE
    if whole and end - first <= AT_ONCE:
        _advise(libc, first, end, MADV_COLLAPSE)
    # Asked for and freed, these are addresses in the heap, and no memory before they are written on. They are less than
    # may be kept, or they would be given back.
    block = MOST_MMAP // 2
    for start in [libc.malloc(block) for _ in range(min(size * 3 // 4, AHEAD) // block)]:
        libc.free(start)
    _advise(libc, first if whole else end, _heap()[1], MADV_HUGEPAGE)


def _advise(libc: ctypes.CDLL, first: int, end: int, what: int) -> None:
    first, end = -(-first // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
    if first < end:
        libc.madvise(first, end - first, what)


def _heap() -> tuple[int, int, int]:
    """Where the heap begins and ends, and how much of it is in memory that is this process's own."""
    first, end, own, inside = 0, 0, 0, False
    for line in Path("/proc/self/smaps").read_bytes().splitlines():
        word, *rest = line.split()
        if not word.endswith(b":"):
            inside = line.endswith(b"[heap]")
            if inside:
                start, end = (int(address, 16) for address in word.split(b"-"))
                first = first or start
        elif inside and word in (b"Private_Clean:", b"Private_Dirty:"):
            own += int(rest[0]) * 1024
    return first, end, own
