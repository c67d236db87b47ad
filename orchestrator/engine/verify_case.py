"""One training that plan and reference both do: its plan, precision, samples and how far the two may differ.

Token ids lie spread over the whole vocabulary, so that every rank's rows are met. From the second step on one data rank
(with one data rank: one micro-batch) has no valid token at all; everything else is ragged. Next: `verify_rank.py` (the
plan's side), `verify_reference.py` (the other).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orchestrator.config.schema import Precision
from orchestrator.data.order import SampleOrder, shard
from orchestrator.engine.precision import compute_dtype, master_dtype
from orchestrator.engine.verify_reference import NOT_LEARNED, Recipe
from orchestrator.plan.reduce import Reduction, learning_rate
from orchestrator.plan.run_plan import RunPlan

LOSS_SCALE = 2.0**10
"""Of `fp16_mixed`, on both sides: from the engine's first scale the toys' gradients overflow, and steps are skipped."""
_WORDS = 12
"""Distinct token ids, so that a few steps can learn something."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest differences that are still rounding."""

    loss: float
    """Nats per token."""
    gradient: float
    """Largest |difference| over largest |element|, of every parameter."""
    norm: float
    """Relative."""
    weight: float
    """Largest |difference| over the model's largest |weight|."""
    small: float
    """Least that a parameter's largest element counts as, as a share of the model's largest: what cancels in a small
    gradient was of the model's own scale and keeps that rounding."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training to be done twice."""

    title: str
    plan: RunPlan
    double: bool
    """Whether `fp32` is computed in FP64."""
    limits: Limits

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        assert self.plan.parallel is not None
        return self.plan.parallel.data

    @property
    def order(self) -> SampleOrder:
        """Which samples each step trains on: all of them once."""
        training = self.plan.config.training
        assert training.steps is not None
        return SampleOrder(training.seed, training.steps * training.global_batch_size)


# With 8 bits of mantissa a gradient of a few steps is some hundredths off (0.09 is the most that was seen): the limits
# of 2-byte types find a wrong type or a lost half of a sum. Small mistakes are for the comparison in FP64.
LIMITS: dict[Precision, Limits] = {
    "fp32": Limits(loss=1e-5, gradient=1e-5, norm=1e-5, weight=1e-5, small=1e-2),
    "bf16_mixed": Limits(loss=5e-2, gradient=0.3, norm=0.1, weight=1e-2, small=0.1),
    "bf16_pure": Limits(loss=5e-2, gradient=0.3, norm=0.1, weight=2e-2, small=0.1),
    "fp16_mixed": Limits(loss=3e-3, gradient=2e-2, norm=5e-3, weight=3e-3, small=0.1),
}
EXACT = Limits(loss=1e-9, gradient=1e-9, norm=1e-9, weight=1e-9, small=1e-6)


def cases_of(reduction: Reduction) -> tuple[Case, Case]:
    """The arithmetic of the plan in FP64 with its own optimizer, then its own types.

    In the second the optimizer is SGD: Adam's first steps turn the rounding of a gradient near zero into a whole step.
    """
    plan, precision = reduction.plan, reduction.precision
    config = plan.config
    rate = learning_rate("sgd", config.training.gradient_clip)
    sgd = config.optimizer.model_copy(update={"name": "sgd", "lr": rate})
    training = config.training.model_copy(update={"precision": precision})
    typed = replace(plan, config=config.model_copy(update={"optimizer": sgd, "training": training}))
    return (
        Case(f"FP64 with {config.optimizer.name}", plan, True, EXACT),
        Case(f"{precision} with sgd", typed, False, LIMITS[precision]),
    )


def recipe_of(case: Case) -> Recipe:
    """What the reference is told."""
    config = case.plan.config
    optimizer, precision = config.optimizer, config.training.precision
    return Recipe(
        optimizer=optimizer.name,
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay,
        clip=config.training.gradient_clip,
        kept=torch.float64 if case.double else master_dtype(precision),
        computed=torch.float64 if case.double else compute_dtype(precision),
        loss_scale=LOSS_SCALE if precision == "fp16_mixed" else 1.0,
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of a training, by sample id."""

    inputs: Tensor
    """Token ids [samples, sequence]."""
    labels: Tensor
    """Next-token ids [samples, sequence]; `NOT_LEARNED` where nothing is learned."""


def samples_of(case: Case) -> Samples:
    """The samples, a function of the case alone: every rank and the reference make the same."""
    training, vocabulary = case.plan.config.training, case.plan.config.model.vocab_size
    assert training.steps is not None
    count, length = training.steps * training.global_batch_size, training.sequence_length
    generator = torch.Generator().manual_seed(training.seed)
    words = torch.linspace(0, vocabulary - 1, min(_WORDS, vocabulary)).long()
    tokens = words[torch.randint(0, len(words), (count, length + 1), generator=generator)]
    labels = tokens[:, 1:].clone()
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    labels[torch.arange(length)[None, :] >= lengths] = NOT_LEARNED
    for step in range(2, training.steps + 1):
        labels[_without_loss(case, step)] = NOT_LEARNED
    return Samples(tokens[:, :-1].contiguous(), labels)


def global_batches(case: Case, samples: Samples) -> list[tuple[Tensor, Tensor]]:
    """What all data ranks together read in each step: inputs and labels [global batch, sequence]."""
    training = case.plan.config.training
    assert training.steps is not None
    ids = [torch.from_numpy(case.order.ids(step, training.global_batch_size)) for step in range(1, training.steps + 1)]
    return [(samples.inputs[rows], samples.labels[rows]) for rows in ids]


def _without_loss(case: Case, step: int) -> Tensor:
    """Ids of the samples of a step in which nothing is learned: all that one data rank, or one micro-batch, reads."""
    training, ranks = case.plan.config.training, case.data_ranks
    ids = case.order.ids(step, training.global_batch_size)
    if ranks > 1:
        return torch.from_numpy(shard(ids, (step - 2) % ranks, ranks, training.micro_batch_size).ravel())
    own = shard(ids, 0, 1, training.micro_batch_size)
    return torch.from_numpy(own[(step - 2) % len(own)] if len(own) > 1 else own[0][:0])
