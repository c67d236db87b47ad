"""Filling in `parallel=auto` and `cluster.nodes=auto`: which plan, and how many nodes.

Owns what a search decides for `make_plan`. `resolve` gives the configuration with every such `auto` replaced, or the
problem that nothing fits. Refuses to choose what changes learning: model, precision, batch, sequence, optimizer stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.config.schema import ParallelConfig, RunConfig
from orchestrator.errors import Problem
from orchestrator.plan.bounds import Bounds
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.evaluate import Evaluator
from orchestrator.plan.facts import derive
from orchestrator.plan.inventory import take_inventory
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.search import fits_somehow, search
from orchestrator.plan.search_space import Candidate, asked_for, micro_batch_sizes, overrides, schedules, splits
from orchestrator.plan.validate import rules

MOST_NODES = 4096
"""Nodes up to which `cluster.nodes=auto` looks; the largest published runs used about 3,000 nodes of 8."""


Judge = Callable[[RunConfig], tuple[Problem, ...]]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without anything for a search to fill in, or why there is none."""

    config: RunConfig
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


_NOTES = ("parallel=auto: ", "cluster.nodes=auto: ")


def chosen(plan: RunPlan) -> tuple[str, ...]:
    """What a search filled in for this plan, in words; empty when nothing was left to it."""
    return tuple(warning for warning in plan.warnings if warning.startswith(_NOTES))


def plain(config: RunConfig) -> RunConfig:
    """The configuration with the simplest split: what it is refused for, every plan of it would be refused for."""
    training = config.training.model_copy(update={"micro_batch_size": 1})
    return config.model_copy(update={"parallel": ParallelConfig(data=1), "training": training})


def with_nodes(config: RunConfig, nodes: int) -> RunConfig:
    """The configuration on that many nodes."""
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": nodes})})


def resolve(config: RunConfig, problems_of: Judge) -> Resolved:
    """Replace `parallel.strategy=auto` and an open `cluster.nodes` by what a search finds.

    A configuration that asks for neither comes back as it is; so does one that `validate/` refuses, for it to say why.
    `problems_of` judges a configuration with a number of nodes: what `make_plan` finds.
    """
    inventory = take_inventory(config.cluster)
    if config.parallel.strategy == "manual":
        if not inventory.open_ended or config.parallel.data != "auto" or rules.check(derive(_on_one(config))):
            return Resolved(config)
        return _fewest_nodes_for_degrees(config, problems_of)
    problems = rules.check(derive(plain(config)))
    if problems:
        return Resolved(config, problems=problems)
    if inventory.open_ended:
        nodes = fewest_nodes(config)
        if nodes is None:
            return Resolved(config, problems=(no_plan_fits(config, None),))
        chosen = _best(with_nodes(config, nodes))
        return Resolved(chosen.config, (_suffice(nodes), *chosen.notes))
    return _best(config)


def _suffice(nodes: int) -> str:
    return f"cluster.nodes=auto: {'1 node suffices' if nodes == 1 else f'{nodes} nodes suffice'}."


def _no_nodes_divide(config: RunConfig) -> Problem:
    parallel, training = config.parallel, config.training
    return Problem(
        "cluster.nodes",
        f"auto: no number of nodes up to {MOST_NODES} divides into tensor {parallel.tensor} x pipeline "
        f"{parallel.pipeline} x context {parallel.context} with a data degree that divides global_batch_size "
        f"{training.global_batch_size} / micro_batch_size {training.micro_batch_size}.",
        "Set parallel.data, or change the batch.",
    )


def _on_one(config: RunConfig) -> RunConfig:
    """The configuration with one copy, on just enough nodes: judged before any search for more."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": 1, "zero_group": "auto"})})


def can_train(config: RunConfig, candidate: Candidate) -> bool:
    """Whether today's engine runs it: the planner knows more than the engine (`engine_rules.py`)."""
    return not engine_problems(RunPlan(asked_for(config, candidate), None, None, None))


def _best(config: RunConfig) -> Resolved:
    """The best plan that today's engine runs, or the best there is when it runs none."""
    found = search(config, allowed=lambda candidate: can_train(config, candidate))
    if not found.ranked:
        found = search(config)
    if not found.ranked:
        return Resolved(config, problems=(no_plan_fits(config, fewest_nodes(config)),))
    best = found.ranked[0].candidate
    words = " ".join(word for word in overrides(config, best) if word != "parallel.strategy=manual")
    return Resolved(asked_for(config, best), (f"parallel=auto: the best of {len(found.ranked)} plans is {words}.",))


def no_plan_fits(config: RunConfig, nodes: int | None) -> Problem:
    """The problem that no plan fits, with the nearest and with the number of nodes that would do, if any does."""
    if take_inventory(config.cluster).open_ended:
        config = with_nodes(config, MOST_NODES)
    evaluate = Evaluator(config)
    nearest = min(
        (
            shortage
            for split in splits(config)
            for schedule, virtual in schedules(config, split, evaluate.micro_batches(split, 1))
            if (shortage := evaluate.leanest_shortage(split, schedule, virtual)) is not None
        ),
        default=(0.0, "no split is possible"),
    )
    fix = "Use GPUs with more memory" if nodes is None else f"Use cluster.nodes={nodes}"
    return Problem(
        "cluster.nodes",
        f"No plan for this model fits on {take_inventory(config.cluster).describe()}: in the leanest, {nearest[1]}.",
        f"{fix}, a shorter training.sequence_length, or hosts with more memory for parallel.offload=all.",
    )


def _some_plan_fits(config: RunConfig) -> bool:
    """Whether any plan fits without states on the host; the most sharded splits are tried first."""
    bounds = Bounds(Evaluator(config))
    kept = sorted(
        (split for split in splits(config) if not split.offload),
        key=lambda split: (-split.zero_stage, -split.zero_group, -split.tensor * split.pipeline),
    )
    return any(fits_somehow(bounds, split) for split in kept)


def _states_need(config: RunConfig) -> int:
    """Nodes that hold the model's states alone, spread evenly over all their GPUs."""
    evaluate = Evaluator(with_nodes(config, 1))
    gpus = take_inventory(config.cluster).smallest_node
    return max(1, -int(-evaluate.states_bytes() // (evaluate.capacity_bytes * gpus)))


def fewest_nodes(config: RunConfig) -> int | None:
    """The fewest like nodes on which some plan fits, states on the GPUs; None: not even `MOST_NODES`."""
    if config.cluster.node_groups:
        return None
    first = _states_need(config)
    upper = first
    while upper <= MOST_NODES and not _some_plan_fits(with_nodes(config, upper)):
        upper *= 2
    if upper > MOST_NODES:
        return None
    # Awkward numbers of nodes divide badly, so that fitting does not simply grow with their number: try each.
    return next(
        nodes for nodes in range(max(first, upper // 2), upper + 1) if _some_plan_fits(with_nodes(config, nodes))
    )


def _fewest_nodes_for_degrees(config: RunConfig, problems_of: Judge) -> Resolved:
    """`nodes=auto` with `data=auto`: the fewest nodes on which the asked degrees give a legal plan that fits."""
    last: tuple[Problem, ...] = ()
    for nodes in _useful_nodes(config):
        tried = with_nodes(config, nodes)
        last = problems_of(tried)
        if not last:
            return Resolved(tried, (_suffice(nodes),))
    return Resolved(config, problems=last or (_no_nodes_divide(config),))


def _useful_nodes(config: RunConfig) -> Iterator[int]:
    """Numbers of nodes whose GPUs the other degrees and the batch divide, ascending."""
    parallel, size = config.parallel, take_inventory(config.cluster).smallest_node
    fixed = parallel.tensor * parallel.pipeline * parallel.context
    for nodes in range(1, MOST_NODES + 1):
        gpus = nodes * (size // parallel.tensor) * parallel.tensor
        data, rest = divmod(gpus, fixed)
        if data > config.training.global_batch_size:
            return
        if data and not rest and config.training.global_batch_size % (data * config.training.micro_batch_size) == 0:
            yield nodes


def largest_micro_batch(evaluate: Evaluator, candidate: Candidate) -> int:
    """The largest micro-batch with which the candidate's split, schedule and recomputation still fit."""
    course = candidate.course
    for size in reversed(micro_batch_sizes(evaluate.config, candidate.split)):
        count = evaluate.micro_batches(candidate.split, size)
        if (course.schedule, course.virtual_stages) not in schedules(evaluate.config, candidate.split, count):
            continue
        larger = Candidate(candidate.split, course.with_size(size))
        if evaluate.shortage(larger) is None:
            return size
    return course.micro_batch_size
