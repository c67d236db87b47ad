"""A plan for the nodes that remain when others are gone for good: `replan`, pure.

Owns which settings may give way: the data degree, and what follows from it (micro-batch, accumulation, sharding group,
recomputation). Model, global batch, optimizer and length stay, so samples and learning rate of every step stay. Refuses
to cut the model differently over tensor, pipeline and context ranks. `launch/placing.py` decides when to ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.errors import PlanError, Problem
from orchestrator.plan.batch import divisors
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.inventory import uniform_cluster
from orchestrator.plan.layout import nodes_needed
from orchestrator.plan.make import make_plan
from orchestrator.plan.remedy import changed
from orchestrator.plan.run_plan import ParallelFacts, RunPlan
from orchestrator.plan.search_space import RECOMPUTE, recomputations


@dataclass(frozen=True, slots=True)
class Replanned:
    """The plan that a run goes on with."""

    plan: RunPlan
    idle: int
    """Slots that remain and are not used."""
    changes: tuple[str, ...]
    """What gave way, in words: `parallel.data 4 -> 3`."""


def replan(plan: RunPlan, free: Sequence[int]) -> Replanned:
    """The plan with the largest legal data degree on what remains.

    `plan` is the one that the run began with, feasible; `free` the slots that each remaining node offers. Of the plans
    with that degree: least recomputation, then the largest micro-batch up to the one of `plan`.

    Raises PlanError with the arithmetic when not even one data rank fits.
    """
    before, config = plan.parallel, plan.config
    if before is None:
        raise ValueError("a plan without decided degrees cannot be planned anew")
    per_node = uniform_cluster(config.cluster, 1, before.tensor).gpus_per_node
    groups = sum(min(slots, per_node) // before.tensor for slots in free)
    most = min(groups // (before.pipeline * before.context), before.data)
    first_problems: tuple[Problem, ...] = ()
    for data in reversed([degree for degree in divisors(config.training.global_batch_size) if degree <= most]):
        for change in _changes(config, before, data):
            tried = make_plan(changed(_on_nodes(config, before, data, per_node), change))
            problems = (*tried.problems, *(engine_problems(tried) if tried.feasible else ()))
            if not problems:
                used = data * before.tensor * before.pipeline * before.context
                return Replanned(tried, sum(free) - used, _words(plan, tried))
            first_problems = first_problems or problems
    raise PlanError([_none_fits(before, free, groups), *first_problems])


def _changes(config: RunConfig, before: ParallelFacts, data: int) -> Iterator[dict[str, Any]]:
    """What may give way for a data degree, gentlest first. The micro-batch never grows: it was chosen to fit."""
    training, parallel = config.training, config.parallel
    share = config.training.global_batch_size // data
    sizes = [size for size in reversed(divisors(share)) if size <= training.micro_batch_size]
    levels = recomputations(parallel.schedule)
    current = training.activation_checkpointing
    for recompute in levels[RECOMPUTE.index(current) :] if current in levels else (current,):
        for size in sizes:
            yield {
                "parallel.data": data,
                "parallel.zero_group": _zero_group(config, before.context * data),
                "training.micro_batch_size": size,
                "training.activation_checkpointing": recompute,
            }


def _zero_group(config: RunConfig, ranks: int) -> int | str:
    """The sharding group as asked, or the largest below it that divides the ranks that are left."""
    asked = config.parallel.zero_group
    return asked if asked == "auto" else max(size for size in divisors(ranks) if size <= asked)


def _on_nodes(config: RunConfig, before: ParallelFacts, data: int, per_node: int) -> RunConfig:
    world = data * before.tensor * before.pipeline * before.context
    nodes = nodes_needed(world, before.tensor, per_node)
    return config.model_copy(update={"cluster": uniform_cluster(config.cluster, nodes, before.tensor)})


def _words(old: RunPlan, new: RunPlan) -> tuple[str, ...]:
    assert old.parallel is not None and new.parallel is not None
    pairs = [
        ("parallel.data", old.parallel.data, new.parallel.data),
        ("training.micro_batch_size", old.config.training.micro_batch_size, new.config.training.micro_batch_size),
        ("micro-batches a step", old.parallel.micro_batches, new.parallel.micro_batches),
        ("parallel.zero_group", old.parallel.zero_group, new.parallel.zero_group),
        (
            "training.activation_checkpointing",
            old.config.training.activation_checkpointing,
            new.config.training.activation_checkpointing,
        ),
    ]
    return tuple(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)


def _none_fits(before: ParallelFacts, free: Sequence[int], groups: int) -> Problem:
    need = before.pipeline * before.context
    per_rank = need * before.tensor
    message = (
        f"One data rank of this plan takes {per_rank} slots ({need} TP groups of {before.tensor}); "
        f"{len(free)} remaining node{'' if len(free) == 1 else 's'} hold {' + '.join(map(str, free)) or 'nothing'} = "
        f"{groups} TP groups."
    )
    if groups >= need:
        message = (
            f"No data degree that divides the global batch makes a legal plan on the {sum(free)} slots that remain."
        )
    return Problem(
        "cluster", message, "Bring nodes back, or start with smaller parallel degrees; checkpoints load under any."
    )
