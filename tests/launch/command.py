"""`python -m tests.launch.command FOLDER [TOY_X=y ...]`: a launch as a command, each event a line of JSON."""

from __future__ import annotations

import json
import sys
import time

from orchestrator.launch.run import LaunchRequest, launch
from tests.launch.plans import cpu_plan


def main(folder: str, toy: list[str]) -> None:
    started = time.time()

    def tell(event: dict) -> None:
        print(json.dumps(event, default=str), flush=True)

    environment = dict(setting.split("=", 1) for setting in toy)
    request = LaunchRequest(cpu_plan(), folder, started, "tests.launch.toy_engine:run", environment, preload=())
    outcome = launch(request, tell)
    tell(
        {
            "kind": "outcome",
            "status": outcome.status,
            "problems": [str(problem) for problem in outcome.problems],
            "last_step": outcome.attempts[-1].last_step,
            "timings": outcome.timings,
            "seconds_to_first_step": outcome.seconds_to_first_step,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
