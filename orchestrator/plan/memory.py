"""Memory of one GPU of every pipeline rank, by category, at the instant at which it is largest.

Owns which categories exist together at which instant; the categories' sizes come from `states.py` and `activations.py`.
Refuses nothing: a plan that does not fit is a finding of `fit.py`, not an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestrator.config.schema import RunConfig
from orchestrator.plan.activations import (
    BlockActivations,
    block_activations,
    head_activations,
    head_weight_bytes,
    kept_of_head,
    logits_bytes,
    table_bytes,
)
from orchestrator.plan.architecture import architecture_of
from orchestrator.plan.run_plan import ParallelFacts, RankMemory
from orchestrator.plan.schedules import SPLIT_BACKWARDS
from orchestrator.plan.split_memory import Instant, SplitRank, fullest
from orchestrator.plan.split_moments import moments
from orchestrator.plan.stages import V_SHAPED, stages_of_rank
from orchestrator.plan.states import Stages, StateMemory, held_parts, held_stages, rank_elements, state_memory
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.timeline import Crest, Kept, highest_crests, peak_kept, shape_of
from orchestrator.plan.traffic import stream_bytes
from orchestrator.plan.work import Work, moments_share, work_of


def rank_memories(config: RunConfig, parallel: ParallelFacts, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank. `config` has a uniform cluster."""
    return memories_of(work_of(config, parallel), profile)


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
    neighbours: int
    """Stages that it receives from, counted for each of its stages."""


def memories_of(work: Work, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank of a plan."""
    common, held = common_of(work, profile), dict[Stages, Held]()
    return tuple(
        _rank_memory(work, profile, common, _held(work, profile, stages, held), rank)
        for rank, stages in enumerate(held_stages(work.parallel))
    )


def decisive_memories(
    work: Work, profile: SystemProfile, common: Common, held: dict[Stages, Held]
) -> Iterator[RankMemory]:
    """Memory of the pipeline ranks among which the fullest is, in order, each computed when it is asked for.

    Of ranks that hold alike stages the first keeps most where a backward pass is whole: such schedules differ from rank
    to rank in how far forwards are ahead of backwards, and the first is furthest. `held` is filled with what is
    computed, for other plans with the same split of the states.
    """
    first_is_fullest = work.parallel.schedule not in SPLIT_BACKWARDS
    seen: set[Stages] = set()
    for rank, stages in enumerate(held_stages(work.parallel)):
        if stages in seen and first_is_fullest:
            continue
        seen.add(stages)
        yield _rank_memory(work, profile, common, _held(work, profile, stages, held), rank)


def common_of(work: Work, profile: SystemProfile) -> Common:
    """What all ranks of a plan share."""
    return _common(work, profile, block_activations(work, profile))


def _common(work: Work, profile: SystemProfile, block: BlockActivations) -> Common:
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
        narrow=state.raw_gradients / state.gradients if state.raw_gradients < state.gradients else 0.0,
    )


def _held(work: Work, profile: SystemProfile, stages: Stages, held: dict[Stages, Held]) -> Held:
    found = held.get(stages)
    if found is None:
        found = held[stages] = _hold(work, stages, rank_states(work, profile, stages))
    return found


def _hold(work: Work, stages: Stages, states: StateMemory) -> Held:
    facts = work.parallel
    elements = [rank_elements(work.architecture, (stage,), facts.tensor, facts.zero_group).whole for stage in stages]
    shares = tuple(each / max(1, sum(elements)) for each in elements)
    layers = tuple(stage[0] for stage in stages)
    weights = tuple(max(float(count), 0.5) for count in layers)
    outputs = tuple(int(not last) for _, _, last in stages)
    inputs = tuple(int(count > 0 and not first) for count, first, _ in stages)
    neighbours = sum(int(not first) + int(not last) for _, first, last in stages)
    return Held(states, layers, shares, weights, outputs, inputs, any(stage[2] for stage in stages), neighbours)


def rank_states(work: Work, profile: SystemProfile, stages: Stages) -> StateMemory:
    """Model states of one GPU of the pipeline rank that holds `stages`."""
    facts = work.parallel
    state = profile.bytes_of(work.precision)
    if work.moments_share != 1.0:
        state = replace(state, moments=state.moments * work.moments_share)
    elements = rank_elements(work.architecture, stages, facts.tensor, facts.zero_group)
    if profile.one_unit_on_cpu and facts.zero_stage == 0 and not work.on_gpu:
        elements = replace(elements, block=0, ends=elements.whole)
    stage = profile.zero_stage(work)
    return state_memory(
        elements,
        state,
        zero_stage=stage,
        master_gathered=profile.master_gathered,
        offload=work.offload,
        loss_in_head=profile.loss_in_chunks,
        once=facts.micro_batches == 1,
        one_shard=facts.zero_group == 1,
        ends_tied=work.architecture.tied and all(held_parts(stages)[1:]),
    )


def _rank_memory(work: Work, profile: SystemProfile, common: Common, held: Held, rank: int) -> RankMemory:
    facts, states = work.parallel, held.states
    if facts.pipeline > 1 and facts.schedule in SPLIT_BACKWARDS:
        peak = _split_peak(work, common, held, rank)
    else:
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


def _kept(work: Work, common: Common, held: Held, rank: int) -> float:
    """Bytes that the micro-batches in flight keep on a pipeline rank, when it keeps most."""
    facts = work.parallel
    block = common.block
    share = 1.0 + block.deferred / block.kept if block.kept else 1.0
    return _bytes_of(peak_kept(shape_of(facts), rank, held.weights, share), common, held)


def _bytes_of(kept: tuple[Kept, ...], common: Common, held: Held) -> float:
    block, total = common.block, 0.0
    for stage, layers, sends, receives in zip(kept, held.layers, held.outputs, held.inputs, strict=True):
        count = stage.whole + stage.weights_only
        ends = sends * common.boundary - receives * common.inputs
        total += count * (layers * block.kept + ends) + stage.weights_only * layers * block.deferred
    return total


def _split_peak(work: Work, common: Common, held: Held, rank: int) -> Instant:
    """The fullest moment of a schedule that splits its backward passes."""
    facts, count = work.parallel, len(held.layers)
    # In the point of a V a rank hands over to itself; torch keeps that from one step to the next.
    turns = facts.schedule in V_SHAPED and rank == facts.pipeline - 1
    sent = common.received / facts.micro_batches
    own = stages_of_rank(rank, facts.pipeline, facts.virtual_stages, facts.schedule)
    outputs = [0.0 if turns and not at else sends * common.boundary for at, sends in enumerate(held.outputs)]
    kept = [
        layers * common.block.kept + output - reads * common.inputs
        for layers, output, reads in zip(held.layers, outputs, held.inputs, strict=True)
    ]
    kept[-1] += common.head_kept * held.head
    split = SplitRank(
        states=held.states,
        block=common.block,
        layers=held.layers,
        shares=held.gradient_shares,
        kept=tuple(
            layers * common.block.kept
            + output
            - reads * common.inputs
            + common.head_kept * (held.head and stage == own[-1])
            for stage, layers, output, reads in zip(own, held.layers, outputs, held.inputs, strict=True)
        ),
        output=tuple(outputs),
        input=tuple(0.0 if (turns and at) or not stage else sent for at, stage in enumerate(own)),
        lasting=2 * turns * common.received,
        buffers=common.received * (held.neighbours - 2 * turns) + common.tables * count,
        last=count - 1 if held.head else None,
        head_weight=common.head_weight,
        logits=common.logits,
        beside_logits=common.beside_logits - common.head_kept,
        narrow=common.narrow,
        left=1.0 / facts.zero_group if facts.zero_stage else 1.0,
        on_host=work.offload,
    )
    return fullest(split, moments(shape_of(facts), rank, gradients_wait=common.narrow > 0))


def _instants(work: Work, common: Common, held: Held, rank: int) -> tuple[Instant, ...]:
    """The moments that can be the peak: those around the loss and a first block's backward, once for each stage that
    begins to have gradients, and those of the last block's backward in the last micro-batch, when all exist."""
    facts, states, block = work.parallel, held.states, common.block
    share = 1.0 + block.deferred / block.kept if block.kept else 1.0
    found = highest_crests(shape_of(facts), rank, held.weights, share)
    # Stages of one rank that follow each other, in the point of a V, hand over what they made without a buffer; torch
    # holds it to the next step all the same.
    handed_over = 2 * int(facts.schedule in V_SHAPED and rank == facts.pipeline - 1)
    neighbours, lasting = held.neighbours - handed_over, common.received * handed_over
    buffers = common.received * neighbours
    if facts.schedule not in ("gpipe", "1f1b"):
        # torch waits for the sends of these schedules at the step's end, and what is sent lives until then; outputs of
        # micro-batches in flight are kept anyway.
        lasting += (
            common.received * held.neighbours * max(0, facts.micro_batches - facts.pipeline) / facts.micro_batches
        )
    buffers += common.tables * len(held.layers)
    moments = [moment for crest in found for moment in _around_loss(work, common, held, crest, buffers, lasting)]
    if held.head and states.buffer_at_loss and not states.gathered_unit:
        # In a step's first micro-batch, when the head's weights, which stay whole, have just come.
        kept, gathered = sum(held.layers) * block.kept + common.beside_logits, states.gathered_at_loss
        moments.append((0.0, float(gathered + states.buffer_at_loss), kept, common.logits, buffers))
    spare = float((len(held.layers) - 1) * states.gathered_unit)
    buffers += (len(held.layers) - 1) * states.reducing
    last = states.gathered_last + spare
    whole = 0.0 if work.offload else float(states.gradients - states.ends_summed)
    moments.append((whole, 0.0, 0.0, 0.0, buffers + states.transient_ends))
    if facts.micro_batches == 2 and facts.pipeline == 1 and states.block_weights:
        # The first of two micro-batches gives no copies back. Gradients of its last block and the embedding come later.
        share = 0.0 if work.offload else 1.0 - states.gathered_last / states.gathered
        first = states.gradients * share, states.gathered, block.kept + lasting
        moments += _in_block(*first, buffers, block, states, facts)
    # A last block's own gradients are not kept yet; the embedding comes after it.
    gradients = 0.0 if work.offload else max(0.0, float(states.gradients - states.last_gradients))
    return (*moments, *_in_block(gradients, last, block.kept + lasting, buffers, block, states, facts))


def _around_loss(
    work: Work, common: Common, held: Held, crest: Crest, buffers: float, lasting: float
) -> tuple[Instant, ...]:
    """The loss, the head's gradients, the first block's backward after it, and the start of the second's, while most is
    kept of the time in which the same stages have gradients."""
    facts, states, block = work.parallel, held.states, common.block
    started, others = any(crest.begun), len(held.layers) - 1
    has = 1.0
    if not all(crest.begun):
        has = sum(share for share, begun in zip(held.gradient_shares, crest.begun, strict=True) if begun)
    # Of a stage that is done, gradients that were added up are cut by now, and copies are given back.
    gone = sum(share for share, done in zip(held.gradient_shares, crest.done, strict=False) if done)
    if gone and facts.zero_stage == 1:
        has -= gone * (1.0 - 1.0 / facts.zero_group)
    copies = 1.0 if states.gathered_unit else 1.0 - gone
    gradients = 0.0 if work.offload else states.gradients * has
    kept = _bytes_of(crest.kept, common, held) + lasting
    # Each further stage of a rank keeps the last buffers that its own units were gathered and reduced in; in a pipeline
    # the last gradients of earlier micro-batches are still being reduced.
    buffers += others * (states.reducing if started else 0)
    spare = float(others * states.gathered_unit)
    reducing = states.reducing if started and facts.pipeline > 1 else 0.0
    gathered = states.gathered * copies + spare
    working, weights = _at_work(facts, block, states)
    at_loss = states.gathered_at_loss * copies + spare + (states.buffer_at_loss if states.gathered_unit else 0)
    loss = (gradients, at_loss, kept + common.beside_logits, common.logits, buffers + reducing)
    # Copies are given back in the last micro-batch; it is the one after which most is kept if there are two.
    last = facts.micro_batches == 1 or (facts.micro_batches == 2 and facts.pipeline == 1 and started)
    if held.head:
        gathered -= states.ends_weights * last
        gradients += 0.0 if work.offload else states.ends_gradients
    # In front of the first block it is the head's gradients that are being reduced.
    first = (float(states.reducing_head) if held.head else reducing) + weights
    at_end = _in_block(gradients, gathered, kept, buffers, block, states, facts)[1:]
    # Gradients that were added up are summed over the ranks in the last micro-batch, with which a pipeline is almost
    # empty; those of a single unit when all else is done.
    summed_last = states.one_unit or (states.summed_gradients > 0 and facts.pipeline > 1)
    second = gathered - states.block_weights * last, kept - block.kept + working
    moments = (
        (gradients, gathered, kept + working, 0.0, buffers + first),
        *(at_end[:1] if summed_last else at_end),
        (gradients, *second, 0.0, buffers + states.reducing + weights),
    )
    if not held.head:
        return moments
    if summed_last:
        return (loss, *moments)
    summed = 0.0 if work.offload else max(0.0, gradients - states.ends_summed)
    return (loss, (summed, gathered, kept + block.handed_on, 0.0, buffers + states.transient_ends), *moments)


def _in_block(
    gradients: float,
    gathered: float,
    kept: float,
    buffers: float,
    block: BlockActivations,
    states: StateMemory,
    facts: ParallelFacts,
) -> tuple[Instant, ...]:
    """A block's backward: where most of it is there at once; at its end, when all its gradients are and nothing of what
    it kept; and while these are summed, where that takes buffers of its own."""
    (working, weights), after = _at_work(facts, block, states), kept - block.kept + block.handed_on
    moments = (
        (gradients, gathered, kept + working, 0.0, buffers + states.reducing + weights),
        (gradients, gathered, after, 0.0, buffers + states.transient_gradients),
    )
    if not states.summed_alone:
        return moments
    left = max(0.0, gradients - states.summed_gradients), max(0.0, gathered - states.summed_weights)
    return (*moments, (*left, after, 0.0, buffers + states.summed_alone))


def _at_work(facts: ParallelFacts, block: BlockActivations, states: StateMemory) -> tuple[float, float]:
    """What a block's backward works on and the weights' gradients beside it."""
    if facts.zero_stage < 2 and facts.micro_batches > 1:
        return block.working_added, min(block.weight_added, states.weight_gradients)
    return block.working, min(block.weight_gradients, states.weight_gradients)


def checkpoint_bytes(config: RunConfig, profile: SystemProfile) -> int:
    """One checkpoint of the whole model: all kept weights and the optimizer's state, each once."""
    state = profile.bytes_of(config.training.precision)
    kept = state.weights + state.master + state.moments * moments_share(config)
    return round(architecture_of(config.model).parameters * kept)
