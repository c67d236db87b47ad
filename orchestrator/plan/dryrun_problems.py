"""A rank that failed in simulation, and a worst rank that does not fit, as problems in the planner's words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from orchestrator.errors import Problem
from orchestrator.plan.architecture import architecture_of
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.validate.wording import gib

_LONGEST = 300
"""Characters of torch's message that are shown; the whole of it is in the JSON."""


def problems_of(plan: RunPlan, report: Mapping[str, Any]) -> tuple[Problem, ...]:
    """What the simulation found against the plan, the planner's own problems not repeated."""
    failed = [entry for entry in report["ranks"] if entry["failed_while"]]
    if failed:
        return tuple(_failure(plan, entry) for entry in _unlike(failed))
    worst = report["worst"]
    if worst is None or worst["total_bytes"] <= report["capacity_bytes"]:
        return ()
    if any(problem.key == "cluster.gpu.memory_gib" for problem in plan.problems):
        return ()
    return (
        Problem(
            "cluster.gpu.memory_gib",
            f"Rank {worst['rank']} holds {gib(worst['simulated_bytes'])} of tensors in the simulated step; with "
            f"{gib(worst['reserve_bytes'])} of context and reserve that is {gib(worst['total_bytes'])}, and "
            f"{plan.config.cluster.gpu.name} holds {gib(report['capacity_bytes'])}.",
            "Use a smaller training.micro_batch_size, training.activation_checkpointing=full, a higher "
            "parallel.zero_stage, or more parallel.tensor or parallel.pipeline ranks.",
        ),
    )


def _unlike(failed: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first rank of each kind of failure."""
    kinds: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in failed:
        kinds.setdefault((entry["failed_while"], entry["error"]), entry)
    return list(kinds.values())


def _failure(plan: RunPlan, entry: Mapping[str, Any]) -> Problem:
    said = " ".join(entry["error"].split())
    if len(said) > _LONGEST:
        said = said[:_LONGEST] + " …"
    keys = suspects(plan)
    what = "; ".join(keys) if keys else _split_words(plan)
    return Problem(
        keys[0].partition(" ")[0].partition("=")[0] if keys else "parallel",
        f"Rank {entry['rank']} (pipeline rank {entry['pipeline']}) fails while {entry['failed_while']}: {said}",
        f"The planner let this through. Change what does not divide: {what}."
        if keys
        else f"The planner let this through and every size divides; this rank is shaped by {what}. Change one of them.",
    )


def suspects(plan: RunPlan) -> list[str]:
    """Sizes of the model that the degrees do not divide, in words that begin with the key of the degree."""
    parallel, config = plan.parallel, plan.config
    assert parallel is not None
    model = architecture_of(config.model)
    sizes = {
        "model.num_attention_heads": model.heads,
        "model.num_key_value_heads": model.key_value_heads,
        "model.intermediate_size": model.ffn,
        "model.hidden_size": model.hidden,
        "model.vocab_size": model.vocab,
        "training.sequence_length": config.training.sequence_length,
    }
    found = [
        f"parallel.tensor={parallel.tensor} does not divide {key}={size}"
        for key, size in sizes.items()
        if parallel.tensor > 1 and size % parallel.tensor
    ]
    batch = config.training.global_batch_size
    part = prod((parallel.data, config.training.micro_batch_size))
    if batch % part:
        found.append(f"parallel.data={parallel.data} x training.micro_batch_size does not divide the batch of {batch}")
    return found


def _split_words(plan: RunPlan) -> str:
    config = plan.config
    values = {
        "parallel.tensor": config.parallel.tensor,
        "parallel.pipeline": config.parallel.pipeline,
        "parallel.schedule": config.parallel.schedule,
        "parallel.zero_stage": config.parallel.zero_stage,
        "parallel.offload": config.parallel.offload,
        "training.activation_checkpointing": config.training.activation_checkpointing,
        "training.precision": config.training.precision,
    }
    return ", ".join(f"{key}={value}" for key, value in values.items())
