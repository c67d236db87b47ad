"""A process that has done its work ends with its own exit code, also where native code crashes at the end of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, ctypes, resource, sys, threading
from orchestrator.cli.leaving import Leaving

leaving = Leaving()
atexit.register(print, "registered later")
threading.Thread(target=lambda: print("waited for")).start()
# What `exit` runs last, after Python: as the destructors of a native library that its own threads still use.
libc = ctypes.CDLL(None)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
libc.__cxa_atexit(libc.abort, None, None)
print("not flushed yet", end=" ")
{ending}
"""


def ended(ending: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ending=ending)], check=False, capture_output=True, text=True
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the crash is planted with glibc")
def test_native_code_has_no_say_in_how_a_finished_process_ends() -> None:
    code, output = ended("sys.exit(leaving.with_code(3))")
    assert code == 3
    assert "not flushed yet" in output and "waited for" in output and "registered later" in output


@pytest.mark.skipif(sys.platform != "linux", reason="the crash is planted with glibc")
def test_the_planted_crash_is_one() -> None:
    assert ended("sys.exit(3)")[0] == -6


def test_a_process_that_has_no_code_yet_ends_as_python_ends_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from orchestrator.cli.leaving import Leaving; Leaving(); raise ValueError('a defect')"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "ValueError: a defect" in done.stderr
