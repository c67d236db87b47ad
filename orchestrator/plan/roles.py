"""Which ranks of a plan are unlike, and how many micro-batches show what all of a step's do. Pure.

Every pipeline rank is a role of its own; the last of all its groups is another where some parameter is not cut into
equal parts. `engine/dryrun.py` runs one rank of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import RunConfig
from orchestrator.plan.architecture import Weight, architecture_of
from orchestrator.plan.layout import Coordinates, Degrees, rank_of
from orchestrator.plan.run_plan import ParallelFacts, RunPlan
from orchestrator.plan.stages import V_SHAPED
from orchestrator.plan.states import held_stages
from orchestrator.plan.vocabulary import padded_rows

_WHOLE_STEP = 600
"""Blocks x micro-batches of a step up to which all micro-batches are simulated."""


@dataclass(frozen=True, slots=True)
class Role:
    """One rank that stands for all that hold the same."""

    rank: int
    pipeline: int
    place: str
    """`first` or `last` of its data, context and tensor groups."""
    stands_for: int
    """Ranks that hold the same or less."""


def roles_of(plan: RunPlan) -> tuple[Role, ...]:
    """One rank for each unlike role, by pipeline rank. `plan` has degrees."""
    facts = plan.parallel
    assert facts is not None, "a plan without degrees has no ranks"
    degrees = Degrees(facts.pipeline, facts.data, facts.context, facts.tensor)
    group = facts.data * facts.context * facts.tensor
    roles = []
    for rank in range(facts.pipeline):
        first = Coordinates(rank, 0, 0, 0)
        last = Coordinates(rank, facts.data - 1, facts.context - 1, facts.tensor - 1)
        unlike = not _cut_evenly(plan.config, facts, rank)
        roles.append(Role(rank_of(first, degrees), rank, "first", group - 1 if unlike else group))
        if unlike:
            roles.append(Role(rank_of(last, degrees), rank, "last", 1))
    return tuple(roles)


def _cut_evenly(config: RunConfig, facts: ParallelFacts, pipeline_rank: int) -> bool:
    """Whether all ranks of a pipeline rank hold parts of the same size of every parameter."""
    architecture = architecture_of(config.model)
    weights: list[Weight] = []
    for layers, embedding, head in held_stages(facts)[pipeline_rank]:
        weights += architecture.block if layers else ()
        weights += architecture.embedding if embedding else ()
        weights += architecture.head if head else ()
    shards = facts.zero_group if facts.zero_stage > 0 else 1
    if padded_rows(architecture.vocab, facts) != architecture.vocab and _holds_vocabulary(facts, pipeline_rank):
        return False  # the parts are alike, but the last one's rows are padding
    return all(_even(weight, facts.tensor, shards) for weight in weights)


def _holds_vocabulary(facts: ParallelFacts, pipeline_rank: int) -> bool:
    return any(embedding or head for _, embedding, head in held_stages(facts)[pipeline_rank])


def _even(weight: Weight, tensor: int, shards: int) -> bool:
    rows = weight.shape[0]
    if tensor > 1 and weight.tensor_dim is not None:
        if weight.shape[weight.tensor_dim] % tensor:
            return False
        rows = rows // tensor if weight.tensor_dim == 0 else rows
    return rows % shards == 0


def simulated_micro_batches(facts: ParallelFacts) -> tuple[int, ...]:
    """How many micro-batches a step is simulated with: all of them, or two numbers from which the rest follows.

    Once a schedule repeats itself, each further round of micro-batches adds the same calls, FLOPs and bytes. Two counts
    that both lie beyond the start give what a round adds.
    """
    count, pipeline = facts.micro_batches, facts.pipeline
    fullest = max(sum(stage[0] for stage in stages) for stages in held_stages(facts))
    if count * fullest <= _WHOLE_STEP:
        return (count,)
    low, step = 3, 1
    if facts.schedule in ("gpipe", "1f1b") and pipeline > 1:
        # 1F1B keeps its last tensors of a round only some rounds after its start.
        low = 2 * pipeline
    elif facts.schedule in V_SHAPED and pipeline > 1:
        low = 3 * pipeline
    elif pipeline > 1:
        if count % pipeline:
            return (count,)  # rounds of an uneven length: no two counts take the same course
        low, step = 2 * pipeline, pipeline
    return (low, low + step) if count > low + step else (count,)


def extended(low: float, high: float, counts: tuple[int, int], count: int) -> float:
    """What `count` micro-batches come to when `counts[0]` come to `low` and `counts[1]` to `high`."""
    return high + (count - counts[1]) * (high - low) / (counts[1] - counts[0])
