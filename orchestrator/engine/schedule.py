"""Learning rate as a pure function of the step: nothing to save, nothing to restore. Imports no torch."""

from __future__ import annotations

import math

from orchestrator.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (1 is the first) in a run of `steps`.

    It rises linearly to `lr`, reached at step `warmup_steps`, then follows the named shape down to
    `lr * minimum_ratio`, reached at `decay_steps` (default: the last step) and kept from there on.
    """
    schedule = optimizer.schedule
    warmup = schedule.warmup_steps
    if step <= warmup:
        return optimizer.lr * step / warmup
    if schedule.name == "constant":
        return optimizer.lr
    end = schedule.decay_steps if schedule.decay_steps is not None else steps
    progress = min((step - warmup) / (end - warmup), 1.0) if end > warmup else 1.0
    share = 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.lr * (schedule.minimum_ratio + (1.0 - schedule.minimum_ratio) * share)
