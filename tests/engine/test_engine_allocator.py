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
for _ in range(3):
    values * values
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    values * values
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    result = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(result.stdout)


def test_a_second_large_tensor_touches_no_new_page() -> None:
    kept, given_back = page_faults("kept"), page_faults("given back")
    assert 4 * kept < given_back  # with transparent huge pages there are few faults either way
