"""The plan's side of `verify`: one rank builds, steps and gives back its own parts, with the engine's own code.

Everything between the samples and the weights is what `train` runs: mesh, build, order of samples, agreement on the
valid tokens, step. Parts of tensors stay parts, so that whoever puts them together (`verify_compare.py`) sees where
ranks hold different values of the same element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestrator.data.order import shard
from orchestrator.engine import build, mesh, step
from orchestrator.engine.agreement import agree
from orchestrator.engine.gradients import local
from orchestrator.engine.initialise import offsets
from orchestrator.engine.precision import doubled
from orchestrator.engine.state import saved_parameters
from orchestrator.engine.step import MicroBatch, Parts
from orchestrator.engine.verify_case import LOSS_SCALE, Case, samples_of
from orchestrator.engine.verify_reference import NOT_LEARNED


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    start: tuple[int, ...]
    """Where the part begins in it."""
    values: Tensor


@dataclass(slots=True)
class RankTrace:
    """What one rank saw of a training; lists are by step."""

    initial: dict[str, Part] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    """Valid tokens by data rank, as all ranks agreed on them."""
    samples: list[list[int]] = field(default_factory=list)
    """Ids that all data ranks together read, sorted."""
    gradients: list[dict[str, Part]] = field(default_factory=list)
    weights: dict[str, Part] = field(default_factory=dict)


def run_cases(
    cases: Sequence[Case], beat: Callable[[str], None], mistake: Callable[[], Any] = nullcontext
) -> list[RankTrace]:
    """Do every training (collective); `beat` hears where it is. `mistake`: a context to run in, for planted faults."""
    found = []
    for case in cases:
        with doubled() if case.double else nullcontext(), mistake():
            found.append(_run(case, beat))
    return found


def _run(case: Case, beat: Callable[[str], None]) -> RankTrace:
    plan = case.plan
    assert plan.parallel is not None and plan.config.training.steps is not None
    beat(f"building ({case.title})")
    place = mesh.build_mesh(plan.parallel, "cpu")
    parts = build.build(plan, place, torch.device("cpu"))
    if parts.loss_scale is not None:
        parts.loss_scale.scale.fill_(LOSS_SCALE)
    parameters = saved_parameters(parts)
    trace = RankTrace(initial=_parts(parts, parameters))

    def keep_gradients(*_: Any) -> None:
        trace.gradients.append(_parts(parts, {name: p.grad for name, p in parameters.items() if p.grad is not None}))

    parts.optimizer.register_step_pre_hook(keep_gradients)
    samples = samples_of(case)
    for number in range(1, plan.config.training.steps + 1):
        beat(f"step {number} ({case.title})")
        _step(case, parts, samples.inputs, samples.labels, number, trace)
    trace.weights = _parts(parts, parameters)
    _tied_copies_are_equal(parts)
    return trace


def _step(case: Case, parts: Parts, inputs: Tensor, labels: Tensor, number: int, trace: RankTrace) -> None:
    training, place = case.plan.config.training, parts.mesh
    ids = shard(
        case.order.ids(number, training.global_batch_size), place.data_rank, place.data_ranks, training.micro_batch_size
    )
    batches = [MicroBatch(inputs[rows], labels[rows]) for rows in torch.from_numpy(ids)]
    valid = sum(int((batch.labels != NOT_LEARNED).sum()) for batch in batches)
    agreed = agree(place, ids, valid, stop=False, save=False)
    result = step.train_step(parts, batches, agreed.tokens)
    trace.losses.append(result.loss)
    trace.norms.append(result.gradient_norm)
    trace.tokens.append(agreed.tokens_per_data_rank)
    trace.samples.append(sorted(sample for rank in agreed.samples for sample in rank))


def _parts(parts: Parts, tensors: dict[str, Any]) -> dict[str, Part]:
    logical = {name: parts.padding.logical(name, tensor) for name, tensor in tensors.items()}
    return {
        name: Part(tuple(tensor.shape), tuple(offsets(tensor)), local(tensor).detach().clone())
        for name, tensor in logical.items()
    }


def _tied_copies_are_equal(parts: Parts) -> None:
    """The copies that one rank holds both of; those on two ranks are compared as parts of the same tensor."""
    if parts.tied is not None and len(parts.tied.held) == 2 and not torch.equal(*map(local, parts.tied.held)):
        raise ValueError(f"{parts.tied.original} and its tied copy {parts.tied.copy} are no longer the same values")
