"""What the memory of all ranks of a plan shares, and what follows from the stages that a rank holds: the two inputs of
every moment of `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.plan.activations import (
    BlockActivations,
    block_activations,
    head_activations,
    head_waits,
    head_weight_bytes,
    kept_of_head,
    logits_bytes,
    table_bytes,
)
from orchestrator.plan.states import (
    Stages,
    StateMemory,
    held_parts,
    rank_elements,
    state_memory,
    state_memory_of_one_unit,
)
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.traffic import stream_bytes
from orchestrator.plan.work import Work


@dataclass(frozen=True, slots=True)
class Common:
    """What all ranks of a plan share; the same wherever its states are kept."""

    block: BlockActivations
    logits: float
    beside_logits: float
    """Activations of the head then."""
    boundary: float
    """A stage's output, where it is kept until the backward pass."""
    inputs: float
    """A first block's input, where it is kept in the buffer that it was received in."""
    received: float
    """Buffers of a stage for all micro-batches that it receives from one neighbour."""
    tables: float
    """Buffers of a stage that are there always."""
    head_kept: float
    """Of the head's activations, what is kept until the backward pass."""
    head_weight: float
    """The gradient of the head's weight, where it waits for the backward pass."""
    head_waits: float
    """Of a head that has computed no gradients yet, what is kept until the backward pass."""
    narrow: float
    """Bytes of a gradient as it comes relative to the sum that it is added to; 0: it is added where it comes."""


@dataclass(frozen=True, slots=True)
class Held:
    """What follows from the stages that a rank holds, computed once for all ranks that hold alike ones."""

    states: StateMemory
    layers: tuple[int, ...]
    gradient_shares: tuple[float, ...]
    """Part of the rank's gradients that is each stage's."""
    weights: tuple[float, ...]
    """Layers, a stage without any counting as half of one: it still keeps its input."""
    outputs: tuple[int, ...]
    """1 for a stage that sends its output on, 0 for the last."""
    inputs: tuple[int, ...]
    """1 for a stage whose first block reads what was received, else 0."""
    head: bool
    first: int
    """1 if the first of its stages is the model's, else 0."""
    neighbours: int
    """Stages that it receives from, counted for each of its stages."""


def common_of(work: Work, profile: SystemProfile) -> Common:
    """What all ranks of a plan share."""
    return common_with(work, profile, block_activations(work, profile))


def common_with(work: Work, profile: SystemProfile, block: BlockActivations) -> Common:
    """The same with other activations of a block."""
    boundary = received = inputs = 0.0
    if work.parallel.pipeline > 1:
        stream = stream_bytes(work) / (work.parallel.tensor if work.sequence_parallel else 1)
        boundary = stream if profile.keeps_stage_outputs else 0.0
        if profile.receives_ahead:
            inputs, received = stream, stream * work.parallel.micro_batches
    state = profile.bytes_of(work.precision)
    return Common(
        block=block,
        logits=logits_bytes(work, profile),
        beside_logits=head_activations(work, profile),
        boundary=boundary,
        inputs=inputs,
        received=received,
        tables=table_bytes(work, profile),
        head_kept=kept_of_head(work, profile),
        head_weight=head_weight_bytes(work, profile),
        head_waits=head_waits(work, profile),
        narrow=state.raw_gradients / state.gradients if state.raw_gradients < state.gradients else 0.0,
    )


def held_of(work: Work, profile: SystemProfile, stages: Stages, held: dict[Stages, Held]) -> Held:
    """What follows from `stages`; kept in `held`."""
    found = held.get(stages)
    if found is None:
        found = held[stages] = hold(work, stages, rank_states(work, profile, stages))
    return found


def hold(work: Work, stages: Stages, states: StateMemory) -> Held:
    """What follows from `stages` and their states."""
    facts = work.parallel
    elements = [rank_elements(work.architecture, (stage,), facts.tensor, facts.zero_group).whole for stage in stages]
    shares = tuple(each / max(1, sum(elements)) for each in elements)
    layers = tuple(stage[0] for stage in stages)
    weights = tuple(max(float(count), 0.5) for count in layers)
    outputs = tuple(int(not last) for _, _, last in stages)
    inputs = tuple(int(count > 0 and not first) for count, first, _ in stages)
    neighbours = sum(int(not first) + int(not last) for _, first, last in stages)
    head, first = any(stage[2] for stage in stages), int(stages[0][1])
    return Held(states, layers, shares, weights, outputs, inputs, head, first, neighbours)


def rank_states(work: Work, profile: SystemProfile, stages: Stages) -> StateMemory:
    """Model states of one GPU of the pipeline rank that holds `stages`."""
    facts = work.parallel
    state = profile.bytes_of(work.precision)
    if work.moments_share != 1.0:
        state = replace(state, moments=state.moments * work.moments_share)
    elements = rank_elements(work.architecture, stages, facts.tensor, facts.zero_group)
    options = {
        "master_gathered": profile.master_gathered,
        "offload": work.offload,
        "loss_in_head": profile.loss_in_chunks,
        "once": facts.micro_batches == 1,
        "one_shard": facts.zero_group == 1,
        "ends_tied": work.architecture.tied and all(held_parts(stages)[1:]),
    }
    if profile.one_unit_on_cpu and facts.zero_stage == 0 and not work.on_gpu:
        return state_memory_of_one_unit(elements, state, **options)
    return state_memory(elements, state, zero_stage=profile.zero_stage(work), **options)
