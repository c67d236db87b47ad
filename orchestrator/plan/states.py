"""Model states: parameters, master weights, gradients, optimizer state and gathered copies of one GPU, in bytes.

Owns the ZeRO arithmetic (who shares what from which stage on) for every precision and for states in host memory. Exact,
with the rounding that FSDP2 does: each parameter is cut by rows into ceil-sized chunks, so the first rank of a group,
for which these figures hold, has the most. Activations are in `activations.py`, the sum and its instant in `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """What the head's weights came in, which torch keeps until the next unit is gathered."""
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
    """Gathered copy of one end that is given back after its only backward pass, stage 3 apart."""
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
) -> StateMemory:
    """Bytes of the model states of one GPU.

    `master_gathered`: kept weights are the master weights, compute copies are made from them: two units at a time in
    stage 3, all of them from forward to backward otherwise.
    `loss_in_head`: the loss is largest in the head's forward pass, while its weights are gathered.
    `once`: there is one micro-batch; of several, stages 0 and 1 add up whole gradients and reduce them after the last.
    `one_shard`: weights are shared over one rank, which FSDP2 treats like any other number.

    What lives how long in a reduction is `foreach_reduce` and `FSDPParamGroup.post_backward` of torch 2.13.
    """
    from_1, from_2, from_3 = (elements.shared if zero_stage >= first else elements.whole for first in (1, 2, 3))
    parameters = state.weights * from_3 + state.master * from_1
    gradients = state.gradients * from_2
    optimizer = state.moments * from_1
    unit, accumulates = max(elements.block, elements.ends), zero_stage < 2 and not once
    pair = state.gathered * (elements.block + unit)
    gathered = gathered_last = 0.0
    if zero_stage == 3:
        # Over one rank nothing is gathered ahead.
        gathered = gathered_last = min(state.gathered * unit if one_shard else pair, state.gathered * elements.whole)
    elif master_gathered:
        gathered = state.gathered * elements.whole
        gathered_last = min(state.gathered * (elements.block + elements.ends), gathered)
    transient = transient_ends = reducing = reducing_head = alone = 0.0
    block, copy = elements.block or unit, state.gradients * unit
    raw = most = state.raw_gradients * block
    alone_too = master_gathered and (zero_stage == 0 or one_shard)
    if not master_gathered:
        transient = state.raw_gradients * (unit if zero_stage == 3 else elements.whole)
    elif accumulates:
        # Added to the whole ones unit by unit where these are wider, else weight by weight, of which none is more than
        # a third of a block.
        most = transient = raw if state.raw_gradients != state.gradients else raw / 3
    else:
        # Gradients as they come, and the buffer of their reduction, which lives until the next unit's is made.
        transient = raw + copy
        transient_ends = (state.raw_gradients + state.gradients) * elements.ends
        reducing, reducing_head = state.gradients * block, state.gradients * elements.ends
    # A sum over one rank is divided into a third buffer.
    if alone_too:
        alone, transient_ends = (3.0 * state.gradients * each for each in (block, elements.ends))
    kept_share = gradients / max(1, elements.whole) if once else 0.0
    head = state.gathered * elements.ends if loss_in_head else 0.0
    on_host = parameters + gradients + optimizer if offload else 0.0
    kept = 0.0 if offload else 1.0
    return StateMemory(
        parameters=round(parameters * kept),
        gradients=round(gradients * kept),
        optimizer=round(optimizer * kept),
        gathered=round(gathered),
        gathered_at_loss=round(head if zero_stage == 3 else gathered),
        buffer_at_loss=round(head if zero_stage and not one_shard else 0.0),
        gathered_unit=round(state.gathered * elements.block) if zero_stage == 3 and master_gathered else 0,
        gathered_last=round(gathered_last),
        transient_gradients=round(transient),
        transient_ends=round(transient_ends),
        one_unit=not elements.block and elements.ends == elements.whole,
        summed_alone=round(alone),
        summed_weights=round(state.gathered * (block + (elements.ends if accumulates else 0)) if alone_too else 0.0),
        summed_gradients=round(state.gradients * block if alone_too and accumulates else 0.0),
        weight_gradients=round(most),
        ends_gradients=round(kept_share * elements.ends),
        ends_summed=round(state.gradients * elements.ends if alone_too and accumulates else kept_share * elements.ends),
        last_gradients=round(kept_share * (elements.ends + elements.block)),
        ends_weights=round(state.gathered * elements.ends if once and master_gathered and zero_stage < 3 else 0.0),
        block_weights=round(state.gathered * elements.block if once and master_gathered and zero_stage < 3 else 0.0),
        reducing=round(reducing),
        reducing_head=round(reducing_head),
        host=round(on_host),
    )
