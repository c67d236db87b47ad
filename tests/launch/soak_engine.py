"""The real engine with two weak spots that a test can press from outside, by files in `faults/` of the run's folder.

`block-RANK` (removed as it is taken): the rank enters a barrier that no other rank enters. `slow-RANK`: reading the
samples of every step takes as many seconds longer as the file says, for as long as it is there. `SOAK_STEP_SECONDS`
makes every step of all ranks last that long, so that there is time to hurt them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from orchestrator.plan.rank_task import RankLink, RankTask


class _Pressed:
    """The rank's link, looking for faults each time that a step begins."""

    def __init__(self, link: RankLink, block: Path) -> None:
        self._link = link
        self._block = block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def stop_requested(self) -> bool:
        import torch.distributed as dist

        if self._block.exists():
            self._block.unlink()
            dist.barrier()
        time.sleep(float(os.environ.get("SOAK_STEP_SECONDS", "0")))
        return self._link.stop_requested()


def run_rank(task: RankTask, link: RankLink) -> None:
    """`orchestrator.engine.rank:run_rank` under pressure."""
    from orchestrator.engine import rank
    from orchestrator.engine.feed import Feed

    faults = Path(task.run_directory) / "faults"
    slow, read = faults / f"slow-{task.rank}", Feed.step

    def step(feed: Feed, number: int) -> Any:
        if slow.exists():
            time.sleep(float(slow.read_text() or 0))
        return read(feed, number)

    Feed.step = step  # type: ignore[method-assign]
    rank.run_rank(task, _Pressed(link, faults / f"block-{task.rank}"))  # type: ignore[arg-type]
