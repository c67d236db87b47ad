"""Memory of one GPU of every pipeline rank, by category, at the instant at which it is largest.

Owns which categories exist together at which instant; the categories' sizes come from `states.py` and `activations.py`.
Refuses nothing: a plan that does not fit is a finding of `fit.py`, not an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul

from orchestrator.config.schema import RunConfig
from orchestrator.plan.activations import BlockActivations
from orchestrator.plan.architecture import architecture_of
from orchestrator.plan.held import Common, Held, common_of, common_with, held_of, hold, rank_states
from orchestrator.plan.loss_chunks import gradient_ahead
from orchestrator.plan.run_plan import ParallelFacts, RankMemory
from orchestrator.plan.schedules import SPLIT_BACKWARDS
from orchestrator.plan.split_memory import Instant, SplitRank, fullest
from orchestrator.plan.split_moments import moments
from orchestrator.plan.stages import V_SHAPED, stages_of_rank
from orchestrator.plan.states import Stages, StateMemory, held_stages
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.timeline import Crest, Kept, highest_crests, peak_kept, shape_of
from orchestrator.plan.work import Work, moments_share, work_of


def rank_memories(config: RunConfig, parallel: ParallelFacts, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank. `config` has a uniform cluster."""
    return memories_of(work_of(config, parallel), profile)


def memories_of(work: Work, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank of a plan."""
    common, held = common_of(work, profile), dict[Stages, Held]()
    return tuple(
        _rank_memory(work, profile, common, held_of(work, profile, stages, held), rank)
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
        yield _rank_memory(work, profile, common, held_of(work, profile, stages, held), rank)


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
    return _kept(work, common_with(work, profile, block), hold(work, stages, rank_states(work, profile, stages)), rank)


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
    buffers, lasting = common.received * held.neighbours, 0.0
    if facts.schedule == "interleaved_1f1b":
        # torch waits for the sends of this schedule at the step's end, and what is sent lives until then; outputs of
        # micro-batches in flight are kept anyway.
        lasting = buffers * max(0, facts.micro_batches - facts.pipeline) / facts.micro_batches
    buffers += common.tables * len(held.layers)
    moments = [moment for crest in found for moment in _around_loss(work, common, held, crest, buffers)]
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


def _around_loss(work: Work, common: Common, held: Held, crest: Crest, buffers: float) -> tuple[Instant, ...]:
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
    kept = _bytes_of(crest.kept, common, held) + _sent(facts, common, held, crest)
    others_buffers, reducing, second_buffers = _last_reductions(states, held, facts) if started else (0.0, 0.0, 0.0)
    second_buffers += buffers + (0 if started else states.reducing)
    buffers += others_buffers
    # What a stage's backward pass has gathered ahead goes with the stage's next forward pass, if there is one.
    spare = float(others * states.gathered_unit) if any(crest.done) else 0.0
    gathered = states.gathered * copies + spare
    working, weights = _at_work(facts, block, states)
    at_loss = states.gathered_at_loss * copies + spare + (states.buffer_at_loss if states.gathered_unit else 0)
    loss = (gradients, at_loss, kept + common.beside_logits, common.logits, buffers + reducing)
    # Copies are given back in the last micro-batch; it is the one after which most is kept if there are two.
    last = facts.micro_batches == 1 or (facts.micro_batches == 2 and facts.pipeline == 1 and started)
    if held.head:
        gathered -= states.ends_weights * last
        gradients += 0.0 if work.offload else states.ends_gradients
        if facts.pipeline > 1 and not gradient_ahead(facts.schedule, facts.pipeline):
            # The head keeps its part of every micro-batch that waits for its backward pass.
            kept += (crest.kept[-1].whole - 1) * common.head_waits
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
        (gradients, *second, 0.0, second_buffers + weights),
    )
    if not held.head:
        return moments
    if summed_last:
        return (loss, *moments)
    summed = 0.0 if work.offload else max(0.0, gradients - states.ends_summed)
    if states.summed_gradients and not last:
        # In the last micro-batch: the head's copy goes before its gradients are summed, in a buffer that the next block
        # still finds.
        gathered -= states.ends_weights
        moments = (*moments, (gradients, gathered, kept + working, 0.0, buffers + states.ends_summed + weights))
    return (loss, (summed, gathered, kept + block.handed_on, 0.0, buffers + states.transient_ends), *moments)


def _sent(facts: ParallelFacts, common: Common, held: Held, crest: Crest) -> float:
    """What has been sent and is still held: with several stages outputs and inputs' gradients of all micro-batches that
    are done, until the step's end; in 1F1B the last input's gradient, until the next is sent."""
    if facts.schedule == "1f1b":
        return common.inputs if any(crest.begun) and not held.first else 0.0
    sends = (output + (at >= held.first) for at, output in enumerate(held.outputs))
    return common.received / facts.micro_batches * float(sum(map(mul, crest.passed_on, sends)))


def _last_reductions(states: StateMemory, held: Held, facts: ParallelFacts) -> tuple[float, float, float]:
    """Buffers of the further stages' last reductions, of that of the stage at work, and of both at its second block.

    Each stage keeps those that its own units were reduced in last: in a pipeline gradients of earlier micro-batches, on
    the first stage the embedding's.
    """
    reduced = [states.reducing_head if at < held.first else states.reducing for at in range(len(held.layers))]
    of_work = float(reduced[-1] if facts.pipeline > 1 else 0)
    return float(sum(reduced[:-1])), of_work, float(sum(reduced) - min(reduced) + states.reducing)


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
