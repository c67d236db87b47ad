"""The real engine with two weak spots that a test can press from outside, by files in `faults/` of the run's folder.

`block-RANK` (removed as it is taken): the rank enters a barrier that no other rank enters. `slow-RANK`: every step of
the rank takes as many seconds longer as the file says, for as long as it is there. `SOAK_STEP_SECONDS` makes every step
of all ranks last that long, so that there is time to hurt them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from orchestrator.plan.rank_task import RankLink, RankTask


class _Pressed:
    """The rank's link, looking for faults each time that a step begins."""

    def __init__(self, task: RankTask, link: RankLink) -> None:
        self._link = link
        self._folder = Path(task.run_directory) / "faults"
        self._rank = task.rank
        self._extra = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def pace(self, own_seconds: float) -> None:
        self._link.pace(own_seconds + self._extra)

    def stop_requested(self) -> bool:
        import torch.distributed as dist

        block, slow = self._folder / f"block-{self._rank}", self._folder / f"slow-{self._rank}"
        if block.exists():
            block.unlink()
            dist.barrier()
        self._extra = 0.0
        time.sleep(float(os.environ.get("SOAK_STEP_SECONDS", "0")))
        if slow.exists():
            self._extra = float(slow.read_text() or 0)
            time.sleep(self._extra)
        return self._link.stop_requested()


def run_rank(task: RankTask, link: RankLink) -> None:
    """`orchestrator.engine.rank:run_rank` under pressure."""
    from orchestrator.engine import rank

    rank.run_rank(task, _Pressed(task, link))  # type: ignore[arg-type]
