"""What a rank's process is set to before anything is built."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import os, threading
from orchestrator.engine.compute import finish_time_slices
finish_time_slices()
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0) == os.SCHED_BATCH, found[0] == os.SCHED_BATCH)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the policy is Linux's")
def test_a_rank_and_the_threads_of_its_collectives_are_not_interrupted_by_each_others_messages() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True"]
