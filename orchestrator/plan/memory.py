"""Memory of one GPU of every pipeline rank, by category, at the instant at which it is largest.

Owns which categories exist together at which instant; the categories' sizes come from `states.py` and `activations.py`.
Refuses nothing: a plan that does not fit is a finding of `fit.py`, not an error here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.schema import RunConfig
from orchestrator.plan.activations import BlockActivations, block_activations, logits_bytes
from orchestrator.plan.architecture import architecture_of
from orchestrator.plan.run_plan import ParallelFacts, RankMemory
from orchestrator.plan.stages import stages_of_rank
from orchestrator.plan.states import Stages, StateMemory, held_stages, rank_elements, state_memory
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.timeline import Crest, Kept, highest_crests, peak_kept
from orchestrator.plan.traffic import stream_bytes
from orchestrator.plan.work import Work, moments_share, work_of


def rank_memories(config: RunConfig, parallel: ParallelFacts, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank. `config` has a uniform cluster."""
    return memories_of(work_of(config, parallel), profile)


@dataclass(frozen=True, slots=True)
class _Common:
    """What all ranks of a plan share."""

    block: BlockActivations
    logits: float
    boundary: float
    """A stage's output, where it is kept until the backward pass."""
    received: float
    """Buffers of a stage for all micro-batches that it receives from one neighbour."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What follows from the stages that a rank holds, computed once for all ranks that hold alike ones."""

    states: StateMemory
    layers: tuple[int, ...]
    gradient_shares: tuple[float, ...]
    """Part of the rank's gradients that is each stage's."""
    weights: tuple[float, ...]
    """Layers, a stage without any counting as half of one: it still keeps its input."""
    head: bool
    neighbours: int
    """Stages that it receives from, counted for each of its stages."""


def memories_of(work: Work, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank of a plan."""
    common = _common(work, profile, block_activations(work, profile))
    held: dict[Stages, _Held] = {}
    memories = []
    for rank, stages in enumerate(held_stages(work.parallel)):
        found = held.get(stages)
        if found is None:
            found = held[stages] = _hold(work, stages, rank_states(work, profile, stages))
        memories.append(_rank_memory(work, profile, common, found, rank))
    return tuple(memories)


def _common(work: Work, profile: SystemProfile, block: BlockActivations) -> _Common:
    boundary = received = 0.0
    if work.parallel.pipeline > 1:
        stream = stream_bytes(work) / (work.parallel.tensor if work.sequence_parallel else 1)
        boundary = stream if profile.keeps_stage_outputs else 0.0
        received = stream * work.parallel.micro_batches if profile.receives_ahead else 0.0
    return _Common(block, logits_bytes(work, profile), boundary, received)


def _hold(work: Work, stages: Stages, states: StateMemory) -> _Held:
    facts = work.parallel
    elements = [rank_elements(work.architecture, (stage,), facts.tensor, facts.zero_group).whole for stage in stages]
    shares = tuple(each / max(1, sum(elements)) for each in elements)
    layers = tuple(stage[0] for stage in stages)
    weights = tuple(max(float(count), 0.5) for count in layers)
    neighbours = sum(int(not first) + int(not last) for _, first, last in stages)
    return _Held(states, layers, shares, weights, any(stage[2] for stage in stages), neighbours)


def rank_states(work: Work, profile: SystemProfile, stages: Stages) -> StateMemory:
    """Model states of one GPU of the pipeline rank that holds `stages`."""
    facts = work.parallel
    state = profile.bytes_of(work.precision)
    if work.moments_share != 1.0:
        state = replace(state, moments=state.moments * work.moments_share)
    elements = rank_elements(work.architecture, stages, facts.tensor, facts.zero_group)
    if profile.one_unit_on_cpu and facts.zero_stage == 0 and not work.on_gpu:
        elements = replace(elements, block=0, ends=elements.whole)
    return state_memory(
        elements,
        state,
        zero_stage=profile.zero_stage(work),
        master_gathered=profile.master_gathered,
        offload=work.offload,
        loss_in_head=profile.loss_in_chunks,
    )


def _rank_memory(work: Work, profile: SystemProfile, common: _Common, held: _Held, rank: int) -> RankMemory:
    facts, states = work.parallel, held.states
    peak = max(_instants(work, common, held, rank), key=sum)
    gradients, gathered, activations, logits, buffers = map(round, peak)
    used = states.parameters + states.optimizer + gradients + gathered + activations + logits + buffers
    reserve = round(profile.reserve_bytes(work, used))
    return RankMemory(
        pipeline=rank,
        stages=stages_of_rank(rank, facts.pipeline, facts.virtual_stages, facts.schedule),
        persistent_bytes=states.persistent,
        parameters_bytes=states.parameters,
        gathered_bytes=gathered,
        gradients_bytes=gradients,
        optimizer_bytes=states.optimizer,
        activations_bytes=activations,
        logits_bytes=logits,
        buffers_bytes=buffers,
        reserve_bytes=reserve,
        total_bytes=used + reserve,
        host_bytes=states.host,
    )


def kept_activations(work: Work, profile: SystemProfile, block: BlockActivations, stages: Stages, rank: int) -> float:
    """Bytes that the micro-batches in flight keep on a pipeline rank, when it keeps most."""
    return _kept(work, _common(work, profile, block), _hold(work, stages, rank_states(work, profile, stages)), rank)


def _kept(work: Work, common: _Common, held: _Held, rank: int) -> float:
    """Bytes that the micro-batches in flight keep on a pipeline rank, when it keeps most."""
    facts = work.parallel
    block = common.block
    share = 1.0 + block.deferred / block.kept if block.kept else 1.0
    kept = peak_kept(
        facts.schedule, facts.pipeline, facts.virtual_stages, facts.micro_batches, rank, held.weights, share
    )
    return _bytes_of(kept, common, held)


def _bytes_of(kept: tuple[Kept, ...], common: _Common, held: _Held) -> float:
    block, total = common.block, 0.0
    for stage, layers in zip(kept, held.layers, strict=True):
        count = stage.whole + stage.weights_only
        total += count * (layers * block.kept + common.boundary) + stage.weights_only * layers * block.deferred
    return total


Instant = tuple[float, float, float, float, float]
"""Bytes of gradients, gathered copies, activations, logits and buffers at one moment of a step."""


def _instants(work: Work, common: _Common, held: _Held, rank: int) -> tuple[Instant, ...]:
    """The moments that can be the peak: those around the loss and a first block's backward, once for each stage that
    begins to have gradients, and those of the last block's backward in the last micro-batch, when all exist."""
    facts, states, block = work.parallel, held.states, common.block
    share = 1.0 + block.deferred / block.kept if block.kept else 1.0
    found = highest_crests(
        facts.schedule, facts.pipeline, facts.virtual_stages, facts.micro_batches, rank, held.weights, share
    )
    received = common.received * held.neighbours
    if facts.schedule not in ("gpipe", "1f1b"):
        # torch waits for the sends of these schedules at the step's end, and what is sent lives until then; outputs of
        # micro-batches in flight are kept anyway.
        received += (
            common.received * held.neighbours * max(0, facts.micro_batches - facts.pipeline) / (facts.micro_batches)
        )
    moments = [moment for crest in found for moment in _around_loss(work, common, held, crest, received)]
    spare = float((len(held.layers) - 1) * states.gathered_unit)
    received += (len(held.layers) - 1) * states.reducing
    return (*moments, *_in_block(states.gradients, states.gathered_last + spare, block.kept, received, block, states))


def _around_loss(work: Work, common: _Common, held: _Held, crest: Crest, received: float) -> tuple[Instant, ...]:
    """The loss, start and end of the first block's backward after it, and the start of the second's, while most is
    kept of the time in which the same stages have gradients."""
    states, block = held.states, common.block
    started, others = any(crest.begun), len(held.layers) - 1
    has = 1.0
    if not all(crest.begun):
        has = sum(share for share, begun in zip(held.gradient_shares, crest.begun, strict=True) if begun)
    gradients = 0.0 if work.offload else states.gradients * has
    kept = _bytes_of(crest.kept, common, held)
    # Each further stage of a rank keeps the last buffers that its own units were gathered and reduced in; in a pipeline
    # the last gradients of earlier micro-batches are still being reduced.
    received += others * (states.reducing if started else 0)
    spare = float(others * states.gathered_unit)
    reducing = states.reducing if started and work.parallel.pipeline > 1 else 0.0
    # In front of the first block it is the head's gradients that are being reduced.
    first = float(states.reducing_head) if held.head else reducing
    at_loss = received + reducing + (states.buffer_at_loss if held.head else 0.0)
    gathered = states.gathered + spare
    return (
        (gradients, states.gathered_at_loss + spare, kept, common.logits if held.head else 0.0, at_loss),
        (gradients, gathered, kept + block.working, 0.0, received + first),
        *_in_block(gradients, gathered, kept, received, block, states)[1:],
        (gradients, gathered, kept - block.kept + block.working, 0.0, received + states.reducing),
    )


def _in_block(
    gradients: float, gathered: float, kept: float, received: float, block: BlockActivations, states: StateMemory
) -> tuple[Instant, Instant]:
    """A block's backward: at its start everything that was recomputed is there, at its end all its gradients are, and
    nothing of what it kept."""
    return (
        (gradients, gathered, kept + block.working, 0.0, received + states.reducing),
        (gradients, gathered, kept - block.kept, 0.0, received + states.transient_gradients),
    )


def checkpoint_bytes(config: RunConfig, profile: SystemProfile) -> int:
    """One checkpoint of the whole model: all kept weights and the optimizer's state, each once."""
    state = profile.bytes_of(config.training.precision)
    kept = state.weights + state.master + state.moments * moments_share(config)
    return round(architecture_of(config.model).parameters * kept)
