"""`python -m tests.launch.soak_main [OVERRIDE ...]`: the command `train` with the pressed engine in its ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from orchestrator.cli.main import main
from orchestrator.launch import run
from tests.launch import soak_engine

_launch = run.launch


def _pressed(request: run.LaunchRequest, observe: Any) -> run.LaunchOutcome:
    return _launch(replace(request, engine=f"{soak_engine.__name__}:run_rank"), observe)


if __name__ == "__main__":
    run.launch = _pressed
    sys.exit(main(sys.argv[1:]))
