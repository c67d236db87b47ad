"""Small plans for launch tests, made by hand: placement and launch read degrees, ranks and a few settings, no more."""

from __future__ import annotations

from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.plan.run_plan import MemoryPlan, ModelFacts, ParallelFacts, RankPlace, RunPlan


def cpu_plan(*, nodes: int = 1, slots: int = 2, tensor: int = 1, **fault_tolerance: Any) -> RunPlan:
    """A plan of nodes x slots CPU ranks, data-parallel outside `tensor`."""
    gpu = {"name": "cpu", "memory_gib": 1}
    return _plan("cpu", gpu, nodes, slots, tensor, fault_tolerance)


def cuda_plan(*, nodes: int = 1, gpus: int = 8, tensor: int = 1) -> RunPlan:
    """A plan of nodes x gpus A100 ranks, data-parallel outside `tensor`."""
    return _plan("cuda", {"name": "A100-80GB", "memory_gib": 79.2}, nodes, gpus, tensor, {})


def _plan(
    device: str, gpu: dict[str, Any], nodes: int, slots: int, tensor: int, fault_tolerance: dict[str, Any]
) -> RunPlan:
    world = nodes * slots
    config = RunConfig.model_validate(
        {
            "model": {
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 257,
                "max_position_embeddings": 16,
            },
            "cluster": {
                "device": device,
                "nodes": nodes,
                "gpus_per_node": slots,
                "gpu": gpu,
            },
            "parallel": {"tensor": tensor},
            "training": {"sequence_length": 16, "global_batch_size": world, "steps": 3},
            "fault_tolerance": fault_tolerance,
        }
    )
    parallel = ParallelFacts(
        data=world // tensor,
        tensor=tensor,
        pipeline=1,
        context=1,
        zero_stage=0,
        zero_group=world // tensor,
        replicate=1,
        world_size=world,
        schedule="1f1b",
        virtual_stages=1,
        micro_batches=1,
        stage_layers=((0, 1),),
    )
    ranks = tuple(
        RankPlace(rank, rank // slots, rank % slots, data=rank // tensor, pipeline=0, context=0, tensor=rank % tensor)
        for rank in range(world)
    )
    memory = MemoryPlan(int(gpu["memory_gib"] * 2**30), None, None, ())
    return RunPlan(config, ModelFacts(1, 1.0), parallel, memory, ranks=ranks)
