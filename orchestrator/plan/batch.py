"""Batch arithmetic: micro-batches, steps, tokens, and the nearest values that work.

Owns every relation between global batch, micro-batch, data ranks, steps and tokens. Nothing is rounded silently: what
does not divide is None here and a problem in `validate/batch_rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.config.schema import TrainingConfig


def micro_batches(global_batch: int, micro_batch: int, data: int) -> int | None:
    """Micro-batches of one step and data rank; None when they do not come out whole."""
    per_round = micro_batch * data
    return None if global_batch % per_round else global_batch // per_round


def tokens_per_step(training: TrainingConfig) -> int:
    """Tokens of one optimizer step over all ranks."""
    return training.global_batch_size * training.sequence_length


def steps_of(training: TrainingConfig) -> int | None:
    """Optimizer steps of the run: as asked, or as many whole steps as `tokens` needs; None when neither is given."""
    if training.steps is not None:
        return training.steps
    if training.tokens is None:
        return None
    return -(-training.tokens // tokens_per_step(training))


def tokens_of(training: TrainingConfig) -> int | None:
    """Tokens of the run, in whole steps; None when no length is given."""
    steps = steps_of(training)
    return None if steps is None else steps * tokens_per_step(training)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number`, ascending. O(sqrt(number))."""
    low, high = [], []
    candidate = 1
    while candidate * candidate <= number:
        if number % candidate == 0:
            low.append(candidate)
            if candidate != number // candidate:
                high.append(number // candidate)
        candidate += 1
    return tuple(low + high[::-1])


def nearest(value: int, allowed: Iterable[int]) -> tuple[int, ...]:
    """The closest allowed value below (or equal) and above `value`, ascending; one of them may not exist."""
    choices = sorted(set(allowed))
    below = [choice for choice in choices if choice <= value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return tuple(below + above)


def nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` just below and above `value` (at least `unit` itself), ascending."""
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)
