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
from orchestrator.plan.states import StateMemory, held_stages, rank_elements, state_memory
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.timeline import peak_kept
from orchestrator.plan.traffic import stream_bytes
from orchestrator.plan.work import Work, moments_share, work_of


@dataclass(frozen=True, slots=True)
class Instant:
    """Bytes that exist at one moment of a step, beside parameters and optimizer state, which always do."""

    gradients: float
    gathered: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.gradients + self.gathered + self.activations + self.logits + self.buffers


def rank_memories(config: RunConfig, parallel: ParallelFacts, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank. `config` has a uniform cluster."""
    return memories_of(work_of(config, parallel), profile)


def memories_of(work: Work, profile: SystemProfile) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank of a plan."""
    block = block_activations(work, profile)
    return tuple(_rank_memory(work, profile, block, rank) for rank in range(work.parallel.pipeline))


def rank_states(work: Work, profile: SystemProfile, pipeline_rank: int) -> StateMemory:
    """Model states of one GPU of a pipeline rank."""
    facts = work.parallel
    state = profile.bytes_of(work.precision)
    if work.moments_share != 1.0:
        state = replace(state, moments=state.moments * work.moments_share)
    stages = held_stages(facts, pipeline_rank)
    elements = rank_elements(work.architecture, stages, facts.tensor, facts.zero_group)
    return state_memory(
        elements,
        state,
        zero_stage=profile.zero_stage(work),
        reducing_ranks=facts.data * facts.context,
        master_gathered=profile.master_gathered,
        offload=work.offload,
    )


def _rank_memory(work: Work, profile: SystemProfile, block: BlockActivations, rank: int) -> RankMemory:
    facts = work.parallel
    states = rank_states(work, profile, rank)
    peak = max(_instants(work, profile, block, states, rank), key=lambda instant: instant.total)
    used = states.parameters + states.optimizer + peak.total
    reserve = round(profile.context_bytes + profile.reserve_share * used)
    sizes = {name: round(getattr(peak, name)) for name in ("gradients", "gathered", "activations", "logits", "buffers")}
    return RankMemory(
        pipeline=rank,
        stages=stages_of_rank(rank, facts.pipeline, facts.virtual_stages, facts.schedule),
        persistent_bytes=states.persistent,
        parameters_bytes=states.parameters,
        gathered_bytes=sizes["gathered"],
        gradients_bytes=sizes["gradients"],
        optimizer_bytes=states.optimizer,
        activations_bytes=sizes["activations"],
        logits_bytes=sizes["logits"],
        buffers_bytes=sizes["buffers"],
        reserve_bytes=reserve,
        total_bytes=states.parameters + states.optimizer + sum(sizes.values()) + reserve,
        host_bytes=states.host,
    )


def kept_activations(work: Work, profile: SystemProfile, block: BlockActivations, rank: int) -> tuple[int, float]:
    """(micro-batches in flight, bytes that they keep) on a pipeline rank, when it keeps most."""
    facts = work.parallel
    layers = tuple(float(count) for count, _, _ in held_stages(facts, rank))
    kept = peak_kept(
        facts.schedule,
        facts.pipeline,
        facts.virtual_stages,
        facts.micro_batches,
        rank,
        # A stage without blocks still keeps its input, which must count when the peak is looked for.
        tuple(max(count, 0.5) for count in layers),
    )
    in_flight = [stage.whole + stage.weights_only for stage in kept]
    activations = sum(count * n * block.kept for count, n in zip(in_flight, layers, strict=True))
    if facts.pipeline > 1 and profile.keeps_stage_outputs:
        activations += sum(in_flight) * stream_bytes(work) / (facts.tensor if work.sequence_parallel else 1)
    return max(in_flight), activations


def _instants(
    work: Work, profile: SystemProfile, block: BlockActivations, states: StateMemory, rank: int
) -> tuple[Instant, ...]:
    """The moments that can be the peak: the loss, start and end of the first block's backward after it, and those of
    the last block's backward in the last micro-batch, when all gradients exist."""
    facts = work.parallel
    stages = held_stages(facts, rank)
    in_flight, activations = kept_activations(work, profile, block, rank)
    head = any(stage[2] for stage in stages)
    # Gradients of earlier micro-batches are there at the peak unless it comes before the first backward.
    started = facts.micro_batches > in_flight and not work.offload
    gradients = states.gradients if started else 0.0
    loss = Instant(
        gradients=gradients,
        gathered=states.gathered,
        activations=activations,
        logits=logits_bytes(work, profile) if head else 0.0,
        buffers=0.0,
    )
    done = Instant(
        gradients=states.gradients,
        gathered=states.gathered_last,
        activations=block.kept,
        logits=0.0,
        buffers=0.0,
    )
    after_loss = replace(loss, logits=0.0)
    return (loss, *_in_block(after_loss, block, states), *_in_block(done, block, states))


def _in_block(around: Instant, block: BlockActivations, states: StateMemory) -> tuple[Instant, Instant]:
    """A block's backward: at its start everything that was recomputed is there, at its end all its gradients are."""
    start = replace(around, activations=around.activations + block.working, buffers=states.reducing)
    return start, replace(around, buffers=states.transient_gradients)


def checkpoint_bytes(config: RunConfig, profile: SystemProfile) -> int:
    """One checkpoint of the whole model: all kept weights and the optimizer's state, each once."""
    state = profile.bytes_of(config.training.precision)
    kept = state.weights + state.master + state.moments * moments_share(config)
    return round(architecture_of(config.model).parameters * kept)
