"""Model states: parameters, master weights, gradients, optimizer state and gathered copies of one GPU, in bytes.

Owns the ZeRO arithmetic (who shares what from which stage on) for every precision and for states in host memory. Exact,
with the rounding that FSDP2 does: each parameter is cut by rows into ceil-sized chunks, so the first rank of a group,
for which these figures hold, has the most. Activations are in `activations.py`, the sum and its instant in `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from orchestrator.plan.architecture import Architecture, part_elements, stage_elements
from orchestrator.plan.profiles import StateBytes
from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.stages import stages_of_rank


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
    """Copies of shared or master weights that are there at the same time."""
    transient_gradients: int
    """Gradients of the unit at work before they are shared or accumulated, in both precisions."""
    host: int
    """In host memory, for this GPU."""

    @property
    def persistent(self) -> int:
        """Parameters + gradients + optimizer on the GPU."""
        return self.parameters + self.gradients + self.optimizer


def held_stages(parallel: ParallelFacts, pipeline_rank: int) -> tuple[tuple[int, bool, bool], ...]:
    """(layers, holds embedding, holds head) of every virtual stage of a pipeline rank."""
    last = len(parallel.stage_layers) - 1
    numbers = stages_of_rank(pipeline_rank, parallel.pipeline, parallel.virtual_stages, parallel.schedule)
    return tuple(
        (parallel.stage_layers[stage][1] - parallel.stage_layers[stage][0], stage == 0, stage == last)
        for stage in numbers
    )


@lru_cache(maxsize=65536)
def rank_elements(
    architecture: Architecture, stages: tuple[tuple[int, bool, bool], ...], tensor: int, zero_group: int
) -> StageElements:
    """Elements of a pipeline rank that holds `stages`, each given as (layers, holds embedding, holds head).

    A rank that holds both ends keeps a tied matrix once.
    """
    layers = sum(count for count, _, _ in stages)
    first, last = any(stage[1] for stage in stages), any(stage[2] for stage in stages)
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
    zero_group: int,
    master_gathered: bool,
    whole_gradients: bool,
    offload: bool,
) -> StateMemory:
    """Bytes of the model states of one GPU.

    `master_gathered`: kept weights are the master weights, compute copies are gathered from them: none of them stays in
    stage 3 (two units are there at once) and in stage 0 (one unit), all of them from forward to backward in stages 1
    and 2. `whole_gradients`: gradients are not shared between micro-batches although the stage is 2 or 3.
    """
    from_1, from_2, from_3 = (elements.shared if zero_stage >= stage else elements.whole for stage in (1, 2, 3))
    parameters = state.weights * from_3 + state.master * from_1
    gradients = state.gradients * (elements.whole if whole_gradients else from_2)
    optimizer = state.moments * from_1
    unit = max(elements.block, elements.ends)
    gathered: float = 0.0
    if master_gathered and zero_stage in (1, 2) and not offload:
        gathered = state.gathered * elements.whole
    elif zero_stage == 3 or (master_gathered and offload):
        gathered = state.gathered * (elements.block + unit)
    elif master_gathered:
        gathered = state.gathered * unit
    transient = 0.0
    if master_gathered:
        # The unit at work: its gradients as they come, and their copy in the precision of the reduction; the copy of
        # the unit before is still being reduced. Over one rank nothing is reduced, so only the first exists.
        copies = 2 if zero_group > 1 and zero_stage > 0 else 0
        transient = (state.raw_gradients + copies * state.gradients) * unit
    on_host = parameters + gradients + optimizer if offload else 0.0
    kept = 0.0 if offload else 1.0
    return StateMemory(
        parameters=round(parameters * kept),
        gradients=round(gradients * kept),
        optimizer=round(optimizer * kept),
        gathered=round(gathered),
        transient_gradients=round(transient),
        host=round(on_host),
    )
