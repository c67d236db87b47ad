"""Small configurations, plans and tasks for the engine's tests, made without Hydra."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.plan.make import make_plan
from orchestrator.plan.rank_task import RankTask
from orchestrator.plan.run_plan import RunPlan

_BASE: dict[str, Any] = {
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
    },
    "cluster": {"device": "cpu", "gpus_per_node": 2, "gpu": {"name": "CPU", "memory_gib": 4}},
    "parallel": {"data": 1},
    "training": {
        "sequence_length": 16,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "steps": 5,
        "precision": "fp32",
        "validation_sequences": 12,
    },
    "optimizer": {"lr": 1e-2, "schedule": {"warmup_steps": 2}},
    "data": {"source": "synthetic"},
    "checkpoint": {"every_steps": 0},
}


def tiny_config(**changes: Any) -> RunConfig:
    """The base configuration with changes by dotted key, dots written as two underscores: `training__steps=3`."""
    values = {section: dict(fields) for section, fields in _BASE.items()}
    for key, value in changes.items():
        *path, last = key.split("__")
        place = values
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    world = 1
    for degree in ("data", "tensor", "pipeline", "context"):
        world *= values["parallel"].get(degree, 1)
    values["cluster"] = {**values["cluster"], "gpus_per_node": world}
    return RunConfig.model_validate(values)


def tiny_plan(**changes: Any) -> RunPlan:
    """The plan of `tiny_config`; fails if it is not feasible.

    FP16 is refused on a CPU because it gains nothing there; it computes all the same, so it is planned as BF16 here.
    """
    fp16 = changes.get("training__precision") == "fp16_mixed"
    plan = make_plan(tiny_config(**(changes | {"training__precision": "bf16_mixed"} if fp16 else changes)))
    assert plan.feasible, plan.problems
    return replace(plan, config=tiny_config(**changes)) if fp16 else plan


def tasks_of(
    plan: RunPlan, directory: Path, *, attempt: int = 1, environment: dict[str, str] | None = None
) -> list[RankTask]:
    """A task for every rank of a plan, as one node share would get them."""
    directory.mkdir(parents=True, exist_ok=True)
    return [
        RankTask(
            plan=plan,
            rank=place.rank,
            local_rank=place.rank,
            local_ranks=len(plan.ranks),
            run_directory=str(directory),
            attempt=attempt,
            threads=1,
            command_started=time.time(),
            environment=environment or {},
        )
        for place in plan.ranks
    ]
