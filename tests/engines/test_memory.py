from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from comfedl.engines.memory import CHOSEN, LARGE_PAGES

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")

PAGES = """
import resource, torch
from comfedl.engines.memory import keep
asked = keep(2**28)
def round(): return [torch.ones(2**18) for _ in range(32)]  # 32 MB in pieces of 1 MB
for _ in range(3): round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): round()
print(asked, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LARGE = """
from pathlib import Path
import torch
from comfedl.engines.memory import keep
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
keep(2**30)
kept = [torch.ones(2**18) for _ in range(32)]
large, inside = 0, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split()[0]:
        inside = line.endswith("[heap]")
    if inside and line.startswith("VmFlags:"):
        large += "hg" in line.split()
print(large, resident() - before)
"""


def run(code: str, chosen: bool) -> list[str]:
    """What a process of its own prints, with the user's choice of how glibc keeps memory or without one."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    environment |= {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"} if chosen else {}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize("chosen", [False, True])
def test_memory_is_kept_unless_the_user_has_chosen(chosen: bool) -> None:
    """A round of 32 MB asks the system for its 8192 pages each time, or once."""
    asked, faults = run(PAGES, chosen)
    assert (asked == "True") != chosen
    assert (int(faults) > 20_000) == chosen


@pytest.mark.parametrize("chosen", [False, True])
def test_large_pages_are_asked_for_where_the_system_waits_for_that(chosen: bool) -> None:
    """32 MB are written on; the rest of what may be kept is addresses, and takes no memory."""
    waits = LARGE_PAGES.is_file() and "[madvise]" in LARGE_PAGES.read_text()
    large, grown = run(LARGE, chosen)
    assert (int(large) > 0) == (waits and not chosen)
    assert int(grown) < 100e6
