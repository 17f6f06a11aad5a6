from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from comfedl.engines.kernels.allocator import USER_SETTINGS, large_pages_on_request

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")

PAGES = """
import resource, torch
from comfedl.engines.kernels.allocator import keep_freed_memory as keep
asked = keep(2**28)
def round(): return [torch.ones(2**18) for _ in range(32)]  # 32 MB in pieces of 1 MB
for _ in range(3): round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): round()
print(asked, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LARGE = """
import ctypes, resource, sys
from pathlib import Path
import torch
from comfedl.engines.kernels.allocator import keep_freed_memory as keep
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
def large():
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            inside = line.endswith("[heap]")
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found
holes = [bytearray(100_000) for _ in range(int(sys.argv[1]))]  # of less than a mapping of their own
holes = holes[::20]  # and now one in 2 MB is left
ctypes.CDLL(None).malloc_trim(0)
before = resident()
keep(2**30)
print(resident() - before)
kept = [torch.ones(2**18) for _ in range(32)]
print(large(), resident() - before)
"""

# How much of the heap that there was the system may make into large pages by itself, later on.
ADVISED = """
import ctypes, sys
from pathlib import Path
from comfedl.engines.kernels.allocator import keep_freed_memory as keep
def heap():
    found = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            inside = line.endswith("[heap]")
            if inside: found.append([*(int(address, 16) for address in word.split("-")), False])
        elif inside and word == "VmFlags:":
            found[-1][2] = "hg" in rest
    return found
holes = [bytearray(100_000) for _ in range(4000)][:: int(sys.argv[1])]
ctypes.CDLL(None).malloc_trim(0)
end = heap()[-1][1]
keep(2**30)
print(sum(min(stop, end) - start for start, stop, advised in heap() if advised and start < end))
"""

FORKED = """
import os
from pathlib import Path
from comfedl.engines.kernels.allocator import keep_freed_memory as keep
def own():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))
held = [bytearray(100_000) for _ in range(3000)]  # 300 MB, which a child shares
if os.fork():
    os.wait()
else:
    before = own()
    keep(2**30)
    print(own() - before, flush=True)
    os._exit(0)
"""


def run(code: str, chosen: bool, *given: str) -> list[str]:
    """The output of a new process, with or without allocator settings of the user."""
    environment = {name: value for name, value in os.environ.items() if name not in USER_SETTINGS}
    environment |= {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"} if chosen else {}
    return subprocess.run(
        [sys.executable, "-c", code, *given], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize("chosen", [False, True])
def test_memory_is_kept_unless_the_user_has_chosen(chosen: bool) -> None:
    """A round of 32 MB faults in its 8192 pages every time, or once."""
    asked, faults = run(PAGES, chosen)
    assert (asked == "True") != chosen
    assert (int(faults) > 20_000) == chosen


@pytest.mark.parametrize("chosen", [False, True])
def test_large_pages_are_taken_where_the_system_waits_to_be_asked(chosen: bool) -> None:
    """32 MB are written; the rest of the reserved heap is address space, and takes no memory."""
    asked, large, grown = map(int, run(LARGE, chosen, "0"))
    assert (large > 32e6) == (large_pages_on_request() and not chosen)
    assert asked < 40e6 and grown < 80e6


def test_a_heap_full_of_holes_is_not_filled() -> None:
    asked, _, _ = map(int, run(LARGE, False, "4000"))  # 400 MB
    assert asked < 40e6


@pytest.mark.parametrize(("every", "whole"), [("1", True), ("20", False)])
def test_nor_is_it_later_on(every: str, whole: bool) -> None:
    """With large pages requested, the system fills every 2 MB range that has one page in use."""
    (advised,) = map(int, run(ADVISED, False, every))
    assert (advised > 300e6) == (whole and large_pages_on_request())
    assert whole or advised == 0


def test_a_heap_that_is_shared_with_a_parent_is_not_copied() -> None:
    (grown,) = map(int, run(FORKED, False))
    assert grown < 40e6


def test_little_memory_is_no_less_than_glibc_keeps() -> None:
    _, faults = run(PAGES.replace("keep(2**28)", "keep(1)").replace("2**18", "2**12").replace("32", "4"), False)
    assert int(faults) < 100


def test_of_several_sizes_the_largest_counts() -> None:
    """Otherwise a second engine with little memory would release the first one's after each round."""
    _, faults = run(PAGES.replace("keep(2**28)", "keep(2**28) and keep(2**10)"), False)
    assert int(faults) < 20_000


def test_a_system_that_tells_nothing_is_no_error() -> None:
    """As in a sandbox without /sys, or without /proc."""
    gone = "from comfedl.engines.kernels import allocator as memory; was = memory.Path; "
    for what in ("memory.LARGE_PAGES = was('/nowhere')", "memory.Path = lambda name: was('/nowhere' + name)"):
        assert run(f"{gone}{what}; print(memory.keep_freed_memory(2**28))", False) == ["True"]
