"""Rules of batch and length: what divides, and how long the run is."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.errors import Problem
from orchestrator.plan.batch import divisors, nearest, nearest_multiples
from orchestrator.plan.facts import Facts
from orchestrator.plan.validate.size_rules import LARGEST_WORLD
from orchestrator.plan.validate.wording import one_of


def batch_divides(facts: Facts) -> Iterator[Problem]:
    """global batch = micro-batch x accumulation x data, all whole."""
    if facts.data is None or facts.micro_batches is not None:
        return
    if facts.gpus is not None and facts.data * facts.fixed > facts.gpus:
        # The data degree itself is about to change; what is left of it may divide.
        fitting = facts.gpus // facts.fixed
        if (
            not fitting
            or facts.config.training.global_batch_size % (fitting * facts.config.training.micro_batch_size) == 0
        ):
            return
    if facts.data * facts.fixed > LARGEST_WORLD:
        return
    training, data = facts.config.training, facts.data
    whole, micro = training.global_batch_size, training.micro_batch_size
    fixes = [f"training.global_batch_size={one_of(nearest_multiples(whole, micro * data))}"]
    if whole % data == 0:
        fixes.append(f"training.micro_batch_size={one_of(nearest(micro, divisors(whole // data)))}")
    if whole % micro == 0:
        fits = [
            degree for degree in divisors(whole // micro) if facts.gpus is None or degree * facts.fixed <= facts.gpus
        ]
        fixes.append(f"parallel.data={one_of(nearest(data, fits))}")
    yield Problem(
        "training.global_batch_size",
        f"{whole} sequences are not a whole number of rounds of micro_batch_size {micro} x data "
        f"{data} = {micro * data}.",
        f"Use {', or '.join(fixes)}.",
    )


def length_is_given_once(facts: Facts) -> Iterator[Problem]:
    """Either steps or tokens says how long the run is."""
    training = facts.config.training
    if training.steps is None and training.tokens is None:
        yield Problem(
            "training.steps",
            "Neither training.steps nor training.tokens says how long the run is.",
            "Set one of them.",
        )
    elif training.steps is not None and training.tokens is not None:
        per_step = training.global_batch_size * training.sequence_length
        yield Problem(
            "training.steps",
            f"steps={training.steps} ({training.steps * per_step:,} tokens) and "
            f"tokens={training.tokens:,} both say how "
            "long the run is.",
            "Set one of them and the other to null.",
        )


RULES = (batch_divides, length_is_given_once)
