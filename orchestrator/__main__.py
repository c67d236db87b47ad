"""`python -m orchestrator`: see `cli/main.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

from orchestrator.cli.leaving import Leaving


def run() -> int:
    """The command line as a whole process: nothing else has been imported."""
    return Leaving().with_code(_run())


def _run() -> int:
    try:
        signal.signal(signal.SIGTERM, _interrupt)  # until a run takes it over: as Ctrl-C
        from orchestrator.cli.main import main

        code = main()
    except KeyboardInterrupt:
        code = 4  # interrupted while modules were still being read
    if "ORCHESTRATOR_EXIT_LINE" in os.environ:  # a job: `submit` reads the code from its log
        from orchestrator.launch.jobs import exit_line

        with contextlib.suppress(OSError):
            print(exit_line(code), flush=True)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(run())
