"""What the planner says of one pipeline rank, in the terms in which the engine's own doing is counted.

Bytes by category, collectives by axis and kind, FLOPs: what `dryrun` puts beside its simulated figures. The arithmetic
is that of `memory.py`, `rank_traffic.py` and `architecture.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from orchestrator.plan.loss_chunks import gradient_ahead
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.rank_traffic import Axis, rank_traffic
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.step_seconds import Load, loads
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.vocabulary import padded_rows
from orchestrator.plan.work import Work, work_of

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "buffers")
"""Categories of bytes that are tensors; the reserve is none."""


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """The planner's figures of a rank and step."""

    memory: dict[str, int]
    """Bytes at the peak by category."""
    reserve_bytes: int
    host_bytes: int
    collectives: dict[Axis, tuple[int, int]]
    """(input bytes, calls) by axis; `data` includes replicas of a sharded copy."""
    flops: int
    """Of matrix products and attention, recomputed ones included, nothing halved for the causal mask."""


def planned_rank(plan: RunPlan, pipeline_rank: int) -> PlannedRank:
    """What the plan says of the first rank of a pipeline rank. `plan` has memory."""
    assert plan.parallel is not None and plan.memory is not None, "a plan without degrees has no ranks"
    memory = plan.memory.pipeline_ranks[pipeline_rank]
    work, profile = work_of(plan.config, plan.parallel), profile_named(plan.profile)
    load = loads(work)[pipeline_rank]
    return PlannedRank(
        memory={category: getattr(memory, f"{category}_bytes") or 0 for category in CATEGORIES},
        reserve_bytes=memory.reserve_bytes or 0,
        host_bytes=memory.host_bytes or 0,
        collectives=rank_traffic(work, profile, load, pipeline_rank),
        flops=step_flops(work, profile, load),
    )


def step_flops(work: Work, profile: SystemProfile, load: Load) -> int:
    """FLOPs of a pipeline rank in a step. Forward once, backward twice; flash attention computes the scores again."""
    model, tensor, facts = work.architecture, work.parallel.tensor, work.parallel
    each = [2 * work.tokens * prod(weight.shape) // tensor for weight in model.block if weight.matmul]
    products = sum(each)
    pairs = work.tokens * work.sequence_length * (model.heads // tensor)
    attention = 4 * pairs * model.head_dim
    last = each[-1] if profile.stops_recomputing_early else 0
    again = products + attention - last if work.recompute == "full" else 0
    block = 3 * products + attention * 7 // 2 + again
    # Where the loss's gradient waits for the backward pass, the logits are computed a second time.
    times = 3 if not profile.loss_in_chunks or gradient_ahead(facts.schedule, facts.pipeline) else 4
    rows = padded_rows(model.vocab, facts) // tensor
    head = times * 2 * work.tokens * model.hidden * rows if load.head else 0
    return work.parallel.micro_batches * (load.layers * block + head)
