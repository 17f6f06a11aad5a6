"""Keeps memory freed by one round for the next, and puts the main thread's heap into large pages.

By default glibc returns freed memory to the system at once, and a round of many clients faults it in again page by
page: with 1,000 clients of a small model that is a seventh of the round. Large pages (transparent huge pages), on
systems that give them on request, reduce TLB misses across many tensors.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

# Parameter numbers of mallopt, and the largest value of the second.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_MMAP = 32 * 2**20
LEAST = 128 * 2**10  # what glibc keeps by default
# Advice numbers of madvise: large pages from now on, and for existing memory (since Linux 6.1; an error before).
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
LARGE_PAGE = 2 * 2**20
# How far ahead of the heap's end to request large pages, how much unused memory they may fill, and the largest heap to
# convert at once (a few gigabytes take a second).
AHEAD, SPARE, AT_ONCE = 256 * 2**20, 32 * 2**20, 2**30
# Environment variables by which users configure the allocator; glibc reads them when the process starts.
USER_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_PERTURB_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)

# The largest sizes requested so far in this process: in all, and in large pages.
_most, _most_large = 0, 0


def keep_freed_memory(size: int) -> bool:
    """Let this process keep up to ``size`` freed bytes; returns whether it is possible. The largest size counts."""
    global _most, _most_large
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USER_SETTINGS):
        return False
    libc, size = ctypes.CDLL(None), min(max(size, LEAST), 2**31 - 1)
    if size > _most:
        # Setting the first stops glibc from adapting the second, so set that to the largest value it would reach.
        if not (libc.mallopt(M_TRIM_THRESHOLD, size) and libc.mallopt(M_MMAP_THRESHOLD, MOST_MMAP)):
            return False
        _most = size
    if size > _most_large and threading.current_thread() is threading.main_thread():  # only it uses the heap
        _most_large = size
        with suppress(OSError):  # no /proc or /sys: no large pages
            if large_pages_on_request():
                _enlarge(libc, size)
    return True


def large_pages_on_request() -> bool:
    """Whether this system gives large pages of 2 MB to those who request them only."""
    if not LARGE_PAGES.is_dir() or b"[madvise]" not in (LARGE_PAGES / "enabled").read_bytes():
        return False
    return int((LARGE_PAGES / "hpage_pmd_size").read_bytes()) == LARGE_PAGE


def _enlarge(libc: ctypes.CDLL, size: int) -> None:
    """Request large pages for the heap's future growth, and for the heap itself if all of it is private memory in use.

    Otherwise large pages would fill its holes, or copy what is still shared with the process it was forked from.
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
    # Allocated and freed, these blocks extend the heap's address range but take no memory until written. Their total
    # is below the trim threshold, or glibc would shrink the heap again.
    block = MOST_MMAP // 2
    for start in [libc.malloc(block) for _ in range(min(size * 3 // 4, AHEAD) // block)]:
        libc.free(start)
    _advise(libc, first if whole else end, _heap()[1], MADV_HUGEPAGE)


def _advise(libc: ctypes.CDLL, first: int, end: int, what: int) -> None:
    first, end = -(-first // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
    if first < end:
        libc.madvise(first, end - first, what)


def _heap() -> tuple[int, int, int]:
    """The heap's first and last address, and how many of its bytes are in private memory."""
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
