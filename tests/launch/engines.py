"""The smallest engines: what one forked rank can do."""

from __future__ import annotations

import os
import sys
import threading

from orchestrator.plan.rank_task import RankLink, RankTask


def environment(task: RankTask, link: RankLink) -> None:
    print(f"PASSED_ON={os.environ['PASSED_ON']} OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}")
    print("to the error stream", file=sys.stderr)
    link.report({"kind": "done", "rank": task.rank, "status": "finished", "step": 0, "result": {}})


def mistake(task: RankTask, link: RankLink) -> None:
    raise ValueError("seven is too many")


def forever(task: RankTask, link: RankLink) -> None:
    print("waits for ever")
    threading.Event().wait()
