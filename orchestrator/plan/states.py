"""Model states: parameters, master weights, gradients, optimizer state and gathered copies of one GPU, in bytes.

Owns the ZeRO arithmetic (who shares what from which stage on) for every precision and for states in host memory. Exact,
with the rounding that FSDP2 does: each parameter is cut by rows into ceil-sized chunks, so the first rank of a group,
for which these figures hold, has the most. Activations are in `activations.py`, the sum and its instant in `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from orchestrator.plan.architecture import Architecture, part_elements, stage_elements
from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.stages import stages_of_rank
from orchestrator.plan.system_profile import StateBytes


@dataclass(frozen=True, slots=True)
class StageElements:
    """Parameter elements of one GPU of a pipeline rank, whole and shared over the ZeRO group."""

    whole: int
    """After the tensor cut."""
    shared: int
    """After the tensor cut and the cut over the ZeRO group."""
    block: int
    """One block, after the tensor cut; 0 if the rank holds none."""
    ends: int
    """The larger of embedding and head, after the tensor cut; 0 if the rank holds neither."""


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Model states of one GPU between two steps, and what forward and backward add."""

    parameters: int
    gradients: int
    """As they are when all micro-batches are done."""
    optimizer: int
    gathered: int
    """Copies of shared or master weights that are there at once, from forward to backward."""
    gathered_at_loss: int
    """The same while the loss is computed: in stage 3 none, or those of the head."""
    buffer_at_loss: int
    """Gathered as well: what the head's weights came in, which torch keeps until the next unit is gathered."""
    gathered_unit: int
    """Copy of one block, where copies are given back unit by unit (stage 3)."""
    gathered_last: int
    """The same at the end of the last backward pass."""
    transient_gradients: int
    """Gradients of the unit at work before they are shared or accumulated, in both precisions, and `reducing`."""
    transient_ends: int
    """The same of the larger of embedding and head, nothing else of which is there."""
    one_unit: bool
    """Whether all weights are gathered and reduced together."""
    summed_alone: int
    """Buffers of a unit's reduction over one rank, when nothing else of it is there; 0: it has several ranks."""
    summed_weights: int
    """Gathered copies that have been given back by then."""
    summed_gradients: int
    """Whole gradients that are in these buffers then."""
    weight_gradients: int
    """Most gradients of weights that exist at once, as the backward pass makes them."""
    ends_gradients: int
    """Gradients of one end, as they are kept, where they are not there before their only backward pass."""
    ends_summed: int
    """The same of one end that are in `transient_ends` instead."""
    last_gradients: int
    """The same of one end and a block."""
    ends_weights: int
    """Gathered copy of one end that is given back after its last backward pass, stage 3 apart; none of a tied one,
    whose other end comes last."""
    block_weights: int
    """The same of one block."""
    reducing: int
    """Gradients of the unit before, which are still being reduced while the next is at work."""
    reducing_head: int
    """The same where the unit before is the head (or the embedding, if larger)."""
    host: int
    """In host memory, for this GPU."""

    @property
    def persistent(self) -> int:
        """Parameters + gradients + optimizer on the GPU."""
        return self.parameters + self.gradients + self.optimizer


Stages = tuple[tuple[int, bool, bool], ...]
"""(layers, holds embedding, holds head) of every virtual stage that a pipeline rank holds."""


def held_stages(parallel: ParallelFacts) -> tuple[Stages, ...]:
    """The stages of every pipeline rank."""
    return _held_stages(parallel.stage_layers, parallel.pipeline, parallel.virtual_stages, parallel.schedule)


@lru_cache(maxsize=4096)
def _held_stages(
    stage_layers: tuple[tuple[int, int], ...], pipeline: int, virtual_stages: int, schedule: str
) -> tuple[Stages, ...]:
    last = len(stage_layers) - 1
    return tuple(
        tuple(
            (stage_layers[stage][1] - stage_layers[stage][0], stage == 0, stage == last)
            for stage in stages_of_rank(rank, pipeline, virtual_stages, schedule)
        )
        for rank in range(pipeline)
    )


def held_parts(stages: Stages) -> tuple[int, bool, bool]:
    """(layers, whether the embedding, whether the head) of a pipeline rank that holds `stages`."""
    return (
        sum(layers for layers, _, _ in stages),
        any(embedding for _, embedding, _ in stages),
        any(head for _, _, head in stages),
    )


@lru_cache(maxsize=65536)
def rank_elements(architecture: Architecture, stages: Stages, tensor: int, zero_group: int) -> StageElements:
    """Elements of a pipeline rank that holds `stages`. A rank that holds both ends keeps a tied matrix once."""
    layers, first, last = held_parts(stages)
    ends = max(
        part_elements(architecture.embedding, tensor) if first else 0,
        part_elements(architecture.head, tensor) if last else 0,
    )
    return StageElements(
        whole=stage_elements(architecture, layers, first, last, tensor),
        shared=stage_elements(architecture, layers, first, last, tensor, zero_group),
        block=part_elements(architecture.block, tensor) if layers else 0,
        ends=ends,
    )


def state_memory(
    elements: StageElements,
    state: StateBytes,
    *,
    zero_stage: int,
    master_gathered: bool,
    offload: bool,
    loss_in_head: bool = False,
    once: bool = False,
    one_shard: bool = False,
    ends_tied: bool = False,
) -> StateMemory:
    """Bytes of the model states of one GPU.

    `master_gathered`: kept weights are the master weights, compute copies are made from them: two units at a time in
    stage 3, all of them from forward to backward otherwise.
    `loss_in_head`: the loss is largest in the head's forward pass, while its weights are gathered.
    `once`: there is one micro-batch; of several, stages 0 and 1 add up whole gradients and reduce them after the last.
    `one_shard`: weights are shared over one rank, which FSDP2 treats like any other number.
    `ends_tied`: both ends, held here, are one matrix.

    What lives how long in a reduction is `foreach_reduce` and `FSDPParamGroup.post_backward` of torch 2.13.
    """
    from_1, from_2, from_3 = (elements.shared if zero_stage >= first else elements.whole for first in (1, 2, 3))
    parameters = state.weights * from_3 + state.master * from_1
    gradients = state.gradients * from_2
    optimizer = state.moments * from_1
    accumulates, alone_too = zero_stage < 2 and not once, master_gathered and (zero_stage == 0 or one_shard)
    case = _Case(zero_stage == 3, master_gathered, accumulates, one_shard, alone_too)
    gathered, gathered_last = _gathered(elements, state, case)
    reduction = _reduction(elements, state, case)
    block = elements.block or elements.ends
    kept_share = gradients / max(1, elements.whole) if once else 0.0
    head = state.gathered * elements.ends if loss_in_head else 0.0
    given_back = state.gathered * (master_gathered and zero_stage < 3)
    on_host, kept = (parameters + gradients + optimizer, 0.0) if offload else (0.0, 1.0)
    return StateMemory(
        parameters=round(parameters * kept),
        gradients=round(gradients * kept),
        optimizer=round(optimizer * kept),
        gathered=round(gathered),
        gathered_at_loss=round(head if zero_stage == 3 else gathered),
        buffer_at_loss=round(head if zero_stage and not one_shard else 0.0),
        gathered_unit=round(state.gathered * elements.block) if zero_stage == 3 and master_gathered else 0,
        gathered_last=round(gathered_last),
        transient_gradients=round(reduction.transient),
        transient_ends=round(reduction.transient_ends),
        one_unit=not elements.block and elements.ends == elements.whole,
        summed_alone=round(reduction.alone),
        summed_weights=round(state.gathered * (block + (elements.ends if accumulates else 0)) if alone_too else 0.0),
        summed_gradients=round(state.gradients * block if alone_too and accumulates else 0.0),
        weight_gradients=round(reduction.most),
        ends_gradients=round(kept_share * elements.ends),
        ends_summed=round(state.gradients * elements.ends if alone_too and accumulates else kept_share * elements.ends),
        last_gradients=round(kept_share * (elements.ends + elements.block)),
        ends_weights=round(0.0 if ends_tied else given_back * elements.ends),
        block_weights=round(given_back * elements.block),
        reducing=round(reduction.reducing),
        reducing_head=round(reduction.reducing_head),
        host=round(on_host),
    )


def state_memory_of_one_unit(elements: StageElements, state: StateBytes, *, once: bool, **options: bool) -> StateMemory:
    """`state_memory` of stage 0 where all weights are gathered and reduced together.

    Before that one reduction each weight's gradient lies as it came (of several micro-batches the sums), all gathered
    copies are there, and no buffer is.
    """
    together = replace(elements, block=0, ends=elements.whole)
    memory = state_memory(together, state, zero_stage=0, once=once, **options)
    block = state.raw_gradients * elements.block
    before_last = state.raw_gradients * (elements.whole - elements.ends - elements.block)
    return replace(
        memory,
        transient_gradients=round(block),
        summed_alone=0,
        weight_gradients=round(block),
        ends_gradients=round(state.raw_gradients * elements.ends) if once else 0,
        last_gradients=round(memory.gradients - before_last) if once else 0,
        ends_weights=0,
        reducing=0,
        reducing_head=0,
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """What decides which copies and gradients there are."""

    cut: bool
    """Weights are given back unit by unit (stage 3)."""
    master_gathered: bool
    accumulates: bool
    """Whole gradients of several micro-batches are added up before they are reduced."""
    one_shard: bool
    alone_too: bool
    """Gradients are reduced over one rank as well."""


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Gradients beside the kept ones; the fields of `StateMemory` say of what."""

    transient: float
    transient_ends: float = 0.0
    reducing: float = 0.0
    reducing_head: float = 0.0
    alone: float = 0.0
    most: float = 0.0


def _gathered(elements: StageElements, state: StateBytes, case: _Case) -> tuple[float, float]:
    """Gathered copies at once, and at the end of the last backward pass."""
    whole = state.gathered * elements.whole
    if case.cut:
        # Over one rank nothing is gathered ahead.
        unit = max(elements.block, elements.ends)
        units = unit if case.one_shard else elements.block + unit
        return (min(state.gathered * units, whole),) * 2
    if case.master_gathered:
        return whole, min(state.gathered * (elements.block + elements.ends), whole)
    return 0.0, 0.0


def _reduction(elements: StageElements, state: StateBytes, case: _Case) -> _Reduction:
    unit = max(elements.block, elements.ends)
    block = elements.block or unit
    raw = state.raw_gradients * block
    # A sum over one rank is divided into a third buffer.
    alone, alone_ends = (3.0 * state.gradients * each if case.alone_too else 0.0 for each in (block, elements.ends))
    if not case.master_gathered:
        whole = state.raw_gradients * (unit if case.cut else elements.whole)
        return _Reduction(whole, most=raw)
    if case.accumulates:
        # Added to the whole ones unit by unit where these are wider, else weight by weight, of which none is more than
        # a third of a block.
        most = raw if state.raw_gradients != state.gradients else raw / 3
        return _Reduction(most, alone_ends, alone=alone, most=most)
    # Gradients as they come, and the buffer of their reduction, which lives until the next unit's is made.
    two = (state.raw_gradients + state.gradients) * elements.ends
    return _Reduction(
        transient=raw + state.gradients * unit,
        transient_ends=alone_ends if case.alone_too else two,
        reducing=state.gradients * block,
        reducing_head=state.gradients * elements.ends,
        alone=alone,
        most=raw,
    )
