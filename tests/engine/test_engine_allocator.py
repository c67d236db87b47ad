"""Large tensors reuse the memory of those before them."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's"),
]

PROGRAM = """
import resource, sys, torch
from orchestrator.engine.allocator import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
values = torch.ones(10 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    values * values
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    result = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(result.stdout)


def test_large_tensors_mostly_touch_pages_that_the_process_already_has() -> None:
    """Not from the first on: the heap first grows until aligned blocks find room in what was freed."""
    kept, given_back = page_faults("kept"), page_faults("given back")
    assert 2 * kept < given_back
