"""A small run for the tests of `checkpoint/` and `tracking/`: configuration, plan and records, built in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.checkpoint.manifest import Manifest
from orchestrator.config.schema import RunConfig
from orchestrator.plan.run_plan import ModelFacts, ParallelFacts, RunPlan


def run_config(directory: Path | str, overrides: dict[str, Any] | None = None) -> RunConfig:
    """A valid configuration whose run goes to `directory`; `overrides` are dotted keys."""
    values: dict[str, Any] = {
        "run": {"directory": str(directory), "experiment": "toy"},
        "model": {
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 257,
            "max_position_embeddings": 64,
        },
        "cluster": {"device": "cpu", "gpus_per_node": 2, "gpu": {"name": "cpu", "memory_gib": 1}},
        "training": {"sequence_length": 16, "global_batch_size": 4, "steps": 20, "precision": "fp32"},
    }
    for key, value in (overrides or {}).items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return RunConfig.model_validate(values)


def run_plan(config: RunConfig, world_size: int = 2) -> RunPlan:
    """A plan with degrees and FLOPs, without what the tests here never read."""
    parallel = ParallelFacts(
        data=world_size,
        tensor=1,
        pipeline=1,
        context=1,
        zero_stage=0,
        zero_group=1,
        replicate=world_size,
        world_size=world_size,
        schedule="1f1b",
        virtual_stages=1,
        micro_batches=2,
        stage_layers=((0, 2),),
    )
    return RunPlan(config=config, model=ModelFacts(1000, 6000.0), parallel=parallel, memory=None)


def manifest_of(step: int, **changes: Any) -> Manifest:
    """The facts of a checkpoint of a step, before its files are known."""
    values: dict[str, Any] = {
        "step": step,
        "tokens": 64 * step,
        "seed": 0,
        "data_fingerprint": "corpus-1",
        "data_position": {"step": step},
        "parallel": {"data": 2},
        "mesh": ({"rank": 0}, {"rank": 1}),
        "config": {},
        "versions": {"python": "3.11"},
    }
    return Manifest(**{**values, **changes})


def step_record(step: int, *, attempt: int = 1, time: float | None = None, **more: Any) -> dict[str, Any]:
    """One line of `metrics.jsonl`, its time following from attempt and step."""
    return {
        "step": step,
        "attempt": attempt,
        "loss": 4.0 / step,
        "learning_rate": 1e-3,
        "gradient_norm": 1.0,
        "tokens": 64,
        "step_seconds": 0.5,
        "tokens_per_second": 128.0,
        "mfu": None,
        "memory_bytes": 1000,
        "samples": [[step, step + 1], [step + 2]],
        "tokens_per_data_rank": [32, 32],
        "time": 1_700_000_000.0 + 1000 * attempt + step if time is None else time,
        **more,
    }
