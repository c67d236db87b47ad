"""Steps that are not applied: not a number, a spike of the loss, or left out after a rewind. One decision of all ranks.

Every rank sees the same loss and norm (one all-reduce), so every rank decides alike without another word. `judge` says
what follows by `fault_tolerance.on_nan`; a rewind is an error that `launch/policy.py` answers with new ranks, which
load the newest checkpoint and leave the step out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from orchestrator.config.schema import FaultToleranceConfig
from orchestrator.engine.step import StepResult
from orchestrator.errors import Problem, RunError
from orchestrator.tracking.metrics_log import MetricsLog, read_records

WINDOW = 32
"""Steps whose median a loss is compared with."""
_FEWEST = 8
"""Steps before which no loss counts as a spike: early losses fall quickly and say little."""


class NotFiniteError(RunError, FloatingPointError):
    """Loss or gradient is not a number, infinite or a spike, and `fault_tolerance.on_nan` does not say to go on."""


@dataclass(slots=True)
class LossWatch:
    """What the latest losses were, and how many steps in a row were not applied."""

    tolerance: FaultToleranceConfig
    left_out: tuple[int, ...] = ()
    """Steps that are not applied whatever comes out of them."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    in_a_row: int = 0

    def limit(self, step: int) -> float:
        """Largest loss with which `step` is applied: infinity where nothing speaks against it."""
        if step in self.left_out:
            return -math.inf
        if self.tolerance.spike_factor is None or len(self.recent) < _FEWEST:
            return math.inf
        return self.tolerance.spike_factor * statistics.median(self.recent)

    def judge(self, step: int, result: StepResult, saved_step: int | None) -> None:
        """Take note of a step. Raises NotFiniteError, on every rank alike, when the run does not simply go on."""
        if result.applied:
            self.recent.append(result.loss)
            self.in_a_row = 0
        elif not result.overflowed and step not in self.left_out:
            self.in_a_row += 1
            if self.tolerance.on_nan != "skip" or self.in_a_row > self.tolerance.max_skipped_steps:
                raise NotFiniteError(self._problem(step, result, saved_step))

    def _problem(self, step: int, result: StepResult, saved_step: int | None) -> Problem:
        action, saved = self.tolerance.on_nan, f"the checkpoint of step {saved_step}" if saved_step else "no checkpoint"
        what = f"Step {step} gave loss {result.loss} and gradient norm {result.gradient_norm}"
        if math.isfinite(result.loss) and math.isfinite(result.gradient_norm):
            what += (
                f", above {self.limit(step):.4g} = fault_tolerance.spike_factor={self.tolerance.spike_factor:g} times "
                f"the median of the last {len(self.recent)} steps"
            )
        follows = {
            "stop": f"fault_tolerance.on_nan=stop ends the run ({saved} remains)",
            "skip": f"it is number {self.in_a_row} in a row, more than fault_tolerance.max_skipped_steps="
            f"{self.tolerance.max_skipped_steps} ({saved} remains)",
            "rewind": f"fault_tolerance.on_nan=rewind goes back to {saved} and leaves the step out",
        }[action]
        return Problem(
            "fault_tolerance.on_nan",
            f"{what}: the update was not applied, and {follows}.",
            "Lower optimizer.lr or lengthen optimizer.schedule.warmup_steps, set training.gradient_clip, or use "
            "fault_tolerance.on_nan=skip or =rewind to leave such steps out.",
        )


def watch_losses(tolerance: FaultToleranceConfig, left_out: Sequence[int], log: MetricsLog | None) -> LossWatch:
    """A watch that knows the latest losses of the record, which rank 0 alone reads (collective if spikes are looked
    for)."""
    watch = LossWatch(tolerance, tuple(left_out))
    if tolerance.spike_factor is None:
        return watch
    known = torch.full((WINDOW,), math.nan, dtype=torch.float64)
    if log is not None:
        records = [record for record in read_records(log.path, lists=False) if not record.get("skipped")]
        losses = [float(record["loss"]) for record in records[-WINDOW:]]
        known[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.broadcast(known, 0)
    watch.recent.extend(loss for loss in known.tolist() if math.isfinite(loss))
    return watch
