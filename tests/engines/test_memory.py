from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from comfedl.engines.memory import CHOSEN

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
@pytest.mark.parametrize("chosen", [False, True])
def test_memory_is_kept_unless_the_user_has_chosen(chosen: bool) -> None:
    """A round of 32 MB asks the system for its 8192 pages each time, or once."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    environment |= {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"} if chosen else {}
    found = subprocess.run(
        [sys.executable, "-c", PAGES], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert (found[0] == "True") != chosen
    assert (int(found[1]) > 20_000) == chosen
