"""The real engine with weak spots that a test can press from outside, by files in `faults/` of the run's folder.

`block-RANK` (removed as it is taken): the rank enters a barrier that no other rank enters. `slow-RANK`: reading the
samples of every step takes as many seconds longer as the file says, for as long as it is there. `hold`: nobody begins a
step beyond the one that the file names, unless the ranks are asked to stop. `SOAK_STEP_SECONDS` makes every step of all
ranks last that long, so that there is time to hurt them; `SOAK_POISON=RANK:STEP` makes a weight of that rank not a
number at that step of the first attempt. `found/ATTEMPT` says which checkpoint was the newest when an attempt began.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.folder import newest_complete
from orchestrator.plan.rank_task import Phase, RankLink, RankTask


class _Pressed:
    """The rank's link, looking for faults each time that a step begins."""

    def __init__(self, link: RankLink, faults: Path, rank: int) -> None:
        self._link = link
        self._block = faults / f"block-{rank}"
        self._hold = faults / "hold"
        self.step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def beat(self, phase: Phase, step: int) -> None:
        self.step = step
        self._link.beat(phase, step)

    def stop_requested(self) -> bool:
        import torch.distributed as dist

        if self._block.exists():
            self._block.unlink()
            dist.barrier()
        while self._held() and not self._link.stop_requested():
            time.sleep(0.02)
        time.sleep(float(os.environ.get("SOAK_STEP_SECONDS", "0")))
        return self._link.stop_requested()

    def _held(self) -> bool:
        try:
            return self.step > int(self._hold.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False


def run_rank(task: RankTask, link: RankLink) -> None:
    """`orchestrator.engine.rank:run_rank` under pressure."""
    from orchestrator.engine import rank

    folder = Path(task.run_directory)
    pressed = _Pressed(link, folder / "faults", task.rank)
    _slow_down(folder / "faults" / f"slow-{task.rank}")
    if task.attempt == 1 and os.environ.get("SOAK_POISON", "").startswith(f"{task.rank}:"):
        _poison(pressed, int(os.environ["SOAK_POISON"].partition(":")[2]))
    if task.rank == 0:
        found = newest_complete(folder / "checkpoints")
        (folder / "found").mkdir(exist_ok=True)
        (folder / "found" / str(task.attempt)).write_text(str(found.step if found else 0), encoding="utf-8")
    rank.run_rank(task, pressed)  # type: ignore[arg-type]


def _slow_down(slow: Path) -> None:
    from orchestrator.engine.feed import Feed

    read = Feed.step

    def step(feed: Feed, number: int) -> Any:
        if slow.exists():
            time.sleep(float(slow.read_text() or 0))
        return read(feed, number)

    Feed.step = step  # type: ignore[method-assign]


def _poison(pressed: _Pressed, step: int) -> None:
    import torch

    from orchestrator.engine import train

    compute = train.train_step

    def train_step(parts: Any, *values: Any, **more: Any) -> Any:
        if pressed.step == step:
            with torch.no_grad():
                next(iter(parts.parameters.values())).fill_(float("nan"))
        return compute(parts, *values, **more)

    train.train_step = train_step
