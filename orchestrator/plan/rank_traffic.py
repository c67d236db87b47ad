"""Everything that one pipeline rank hands to collectives in a step, by axis: what `plan.traffic` and `dryrun` report.

Beside what costs time (`traffic.py`) that is what only counts in calls or is nothing but a habit of FSDP2: gathers that
nobody uses, sums of small gradients, the one sum of loss and norm. Their seconds are left out: they are few, or small,
or hidden.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import islice
from typing import Literal, get_args

from orchestrator.plan.architecture import part_elements
from orchestrator.plan.collectives import Group
from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.schedules import SPLIT_BACKWARDS, Shape, rank_actions
from orchestrator.plan.stages import stages_of_rank
from orchestrator.plan.step_seconds import Load
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.timeline import shape_of
from orchestrator.plan.traffic import (
    Transfer,
    boundary_bytes,
    boundary_sends,
    context_transfers,
    data_transfers,
    loss_transfers,
    tensor_transfers,
)
from orchestrator.plan.work import Work

Axis = Literal["tensor", "pipeline", "context", "data"]

_STEP_RESULT_BYTES = 16
"""Loss and squared norm of the whole model, FP64."""
_STAGES_GATHERED = 3
"""Stages of a rank whose weights torch keeps gathered at a time where it handles them itself
(`_add_unshard_reshard` of torch 2.13)."""


def rank_traffic(work: Work, profile: SystemProfile, load: Load, rank: int) -> dict[Axis, tuple[int, int]]:
    """(input bytes, calls) of a pipeline rank with this load, by axis; `data` has replicas of a sharded copy in it."""
    sends = boundary_sends(work, rank)
    found: dict[Axis, tuple[int, int]] = {
        "tensor": _sum(
            *tensor_transfers(work, profile, load.layers, int(load.embedding) + int(load.head)),
            *(loss_transfers(work, profile) if load.head else ()),
            *_sums_of_whole_weights(work, profile, load),
            *_gathers_of_positions(work, load),
        ),
        "pipeline": (round(sends * boundary_bytes(work, profile)), sends),
        "context": _sum(*context_transfers(work, load.layers)),
        "data": _sum(
            *data_transfers(work, profile, load.elements, load.units(work.architecture.tied)).all,
            *_unused_gathers(work, profile, rank),
            *_gathers_again(work, profile, rank),
        ),
    }
    axis = _only_axis(work.parallel)
    if axis is not None:
        size, calls = found[axis]
        found[axis] = size + _STEP_RESULT_BYTES, calls + 1
    return found


def _sum(*transfers: Transfer) -> tuple[int, int]:
    return round(sum(each.input_bytes for each in transfers)), round(sum(each.calls for each in transfers))


def _only_axis(parallel: ParallelFacts) -> Axis | None:
    """The axis whose ranks are all ranks: loss and norm, which all sum once a step, count as its traffic."""
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "data": parallel.data * parallel.context}
    used = [axis for axis in get_args(Axis) if sizes.get(axis, 1) > 1]
    return used[0] if len(used) == 1 else None


def _sums_of_whole_weights(work: Work, profile: SystemProfile, load: Load) -> tuple[Transfer, ...]:
    """Gradients of weights that every tensor rank has whole, norms and biases: where the sequence is cut, each rank has
    a summand of them. FSDP2 sums them one by one when it reduces their unit, in the type that they are added up in."""
    facts = work.parallel
    if facts.tensor == 1 or not work.sequence_parallel or not profile.master_gathered:
        return ()
    stage, state = profile.zero_stage(work), profile.bytes_of(work.precision)
    added_up = stage < 2 and facts.micro_batches > 1
    times = 1 if added_up else facts.micro_batches
    model = work.architecture
    held = (*model.block * load.layers, *(model.head_owned if load.head else ()))
    whole = [weight.elements() for weight in held if weight.tensor_dim is None]
    element = state.gradients if added_up else state.raw_gradients
    return (Transfer("all_reduce", sum(whole) * element * times, float(len(whole) * times), Group(facts.tensor, 1)),)


def _gathers_of_positions(work: Work, load: Load) -> tuple[Transfer, ...]:
    """A table of positions, which every tensor rank has whole, gets its gradient from the whole sequence."""
    facts = work.parallel
    tables = sum(weight.tensor_dim is None for weight in work.architecture.embedding)
    if facts.tensor == 1 or not work.sequence_parallel or not load.embedding or not tables:
        return ()
    stream = float(work.tokens) * work.architecture.hidden * work.activation_bytes
    calls = float(tables * facts.micro_batches)
    return (Transfer("all_gather", stream * calls, calls, Group(facts.tensor, 1)),)


def _unused_gathers(work: Work, profile: SystemProfile, pipeline_rank: int) -> tuple[Transfer, ...]:
    """Gathers that nobody uses. In front of a unit's backward pass FSDP2 gathers the unit whose forward pass came
    before; within a pipelined step it remembers all forward passes, so that a stage's last backward pass finds, before
    its first unit, the last one of an earlier micro-batch (`FSDPParamGroup._backward_prefetch` of torch 2.13). Not
    where some micro-batch was in flight from the first to the last: the first one's order is then left to the end. Nor
    where torch itself gathers whole stages.
    """
    facts = work.parallel
    if facts.pipeline == 1 or facts.schedule in SPLIT_BACKWARDS or not _gathers(facts, profile):
        return ()
    own = stages_of_rank(pipeline_rank, facts.pipeline, facts.virtual_stages, facts.schedule)
    flying, idle = dict.fromkeys(own, 0), dict.fromkeys(own, -1)
    for stage, kind, _, _ in rank_actions(shape_of(facts), pipeline_rank):
        flying[stage] += 1 if kind == "F" else -1
        idle[stage] += flying[stage] == 0
    model, end = work.architecture, len(facts.stage_layers) - 1
    # A stage's only unit is the one at work, and gathered.
    late = [stage for stage in own if idle[stage] > 0 and _units(facts, stage) > 1]
    elements = sum(part_elements(model.head if stage == end else model.block, facts.tensor) for stage in late)
    return (_gather(work, profile, elements, len(late)),)


def _gathers_again(work: Work, profile: SystemProfile, pipeline_rank: int) -> tuple[Transfer, ...]:
    """Of a rank with many stages under the schedules in which torch gathers whole stages, few are gathered at a time:
    each is gathered as often as its turn comes."""
    facts = work.parallel
    if facts.pipeline == 1 or facts.schedule not in SPLIT_BACKWARDS or not _gathers(facts, profile):
        return ()
    times, model, end = _times_gathered(shape_of(facts), pipeline_rank), work.architecture, len(facts.stage_layers) - 1
    elements = calls = 0
    for stage, again in ((stage, count - 1) for stage, count in times.items()):
        first, after = facts.stage_layers[stage]
        ends = (model.embedding if stage == 0 else ()) + (model.head if stage == end else ())
        elements += again * part_elements(model.block * (after - first) + ends, facts.tensor)
        calls += again * _units(facts, stage)
    return (_gather(work, profile, elements, calls),)


@lru_cache(maxsize=256)
def _times_gathered(shape: Shape, rank: int) -> dict[int, int]:
    """How often each stage of a rank is gathered in a step: the next ones to compute are, and no others."""
    actions, gathered, times = rank_actions(shape, rank), frozenset[int](), Counter[int]()
    for place in range(len(actions)):
        following: dict[int, None] = {}
        for action in islice(actions, place, None):
            following[action.stage] = None
            if len(following) == _STAGES_GATHERED:
                break
        times.update(following.keys() - gathered)
        gathered = frozenset(following)
    return times


def _gathers(facts: ParallelFacts, profile: SystemProfile) -> bool:
    return facts.zero_stage > 0 and facts.zero_group > 1 and profile.master_gathered


def _units(facts: ParallelFacts, stage: int) -> int:
    first, after = facts.stage_layers[stage]
    return after - first + (stage in (0, len(facts.stage_layers) - 1))


def _gather(work: Work, profile: SystemProfile, elements: int, calls: int) -> Transfer:
    facts, state = work.parallel, profile.bytes_of(work.precision)
    group = Group(facts.zero_group, facts.tensor, profile.one_network_card)
    return Transfer("all_gather", elements * state.gathered, float(calls), group)
