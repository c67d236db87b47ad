"""Memory of one GPU of every pipeline rank, by category, at the instant at which it is largest.

Owns which categories exist together at which instant; the categories' sizes come from `states.py` and `activations.py`.
Refuses nothing: a plan that does not fit is a finding of `validate/`, not an error here.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.config.schema import RunConfig
from orchestrator.plan.architecture import Architecture, architecture_of
from orchestrator.plan.profiles import SystemProfile
from orchestrator.plan.run_plan import ParallelFacts, RankMemory
from orchestrator.plan.stages import stages_of_rank
from orchestrator.plan.states import StateMemory, held_stages, rank_elements, state_memory
from orchestrator.plan.work import moments_share


def rank_states(
    config: RunConfig, architecture: Architecture, parallel: ParallelFacts, profile: SystemProfile, pipeline_rank: int
) -> StateMemory:
    """Model states of one GPU of a pipeline rank."""
    state = profile.bytes_of(config.training.precision)
    state = replace(state, moments=state.moments * moments_share(config))
    elements = rank_elements(architecture, held_stages(parallel, pipeline_rank), parallel.tensor, parallel.zero_group)
    accumulates = parallel.micro_batches > 1
    whole_gradients = (parallel.zero_stage == 1 and accumulates) or (
        profile.full_gradients_under_pipeline and parallel.pipeline > 1
    )
    return state_memory(
        elements,
        state,
        # One micro-batch in stage 1: gradients are shared as they come, as in stage 2.
        zero_stage=2
        if parallel.zero_stage == 1 and not accumulates and profile.master_gathered
        else parallel.zero_stage,
        zero_group=parallel.zero_group,
        master_gathered=profile.master_gathered,
        whole_gradients=whole_gradients,
        offload=config.parallel.offload == "all",
    )


def rank_memories(config: RunConfig, parallel: ParallelFacts, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank: model states; activations and what depends on them are not computed yet (None)."""
    architecture = architecture_of(config.model)
    memories = []
    for rank in range(parallel.pipeline):
        states = rank_states(config, architecture, parallel, profile, rank)
        memories.append(
            RankMemory(
                pipeline=rank,
                stages=stages_of_rank(rank, parallel.pipeline, parallel.virtual_stages, parallel.schedule),
                persistent_bytes=states.persistent,
                parameters_bytes=states.parameters,
                gathered_bytes=states.gathered,
                gradients_bytes=states.gradients,
                optimizer_bytes=states.optimizer,
                activations_bytes=None,
                logits_bytes=None,
                buffers_bytes=None,
                reserve_bytes=None,
                total_bytes=None,
                host_bytes=states.host,
            )
        )
    return tuple(memories)


def checkpoint_bytes(config: RunConfig, profile: SystemProfile) -> int:
    """One checkpoint of the whole model: the weights that the optimizer updates and its state, each once."""
    state = profile.bytes_of(config.training.precision)
    kept = (state.master or state.weights) + state.moments * moments_share(config)
    return round(architecture_of(config.model).parameters * kept)
