"""The device mesh of a run: always all axes, those that are not used have size 1.

Owns the order of the axes and which group of ranks does what, so that no other file counts ranks. Outermost to
innermost: pipeline, data (= replicate x shard), context, tensor. Refuses a plan whose degrees do not multiply to the
process group's size. Next: `build.py` cuts and wraps the model over these meshes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.stages import stages_of_rank

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes of the whole mesh, outermost first. `replicate` x `shard` are the data-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The whole mesh and this rank's place in it."""

    whole: DeviceMesh
    """All ranks, axes `AXES`."""
    gradient: DeviceMesh
    """Ranks that hold the same part of the model and see other tokens: replicate x shard x context, one axis."""
    sharding: DeviceMesh
    """The same ranks as sharded copies: one axis (the copy's ranks) or, where there are replicas, replicas x copy."""
    tensor: DeviceMesh
    """Ranks that share each layer's matrices, one axis."""
    data_rank: int
    """Which samples this rank reads: 0 to data_ranks - 1."""
    data_ranks: int
    pipeline_rank: int
    holder: tuple[int, ...]
    """Pipeline rank that holds each virtual stage of the model, first stage first."""
    context_rank: int
    tensor_rank: int

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this rank is the one, of all that read the same samples, that reports them and their loss."""
        return self.tensor_rank == 0 and self.context_rank == 0 and self.pipeline_rank == self.holder[-1]

    @property
    def stages(self) -> tuple[int, ...]:
        """Virtual stages that this rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.holder) if holder == self.pipeline_rank)


def build_mesh(parallel: ParallelFacts, device_type: str) -> Mesh:
    """The mesh of the plan's degrees over the ranks of the default process group (collective).

    `device_type` is "cpu" or "cuda". Raises ValueError if the degrees do not multiply to the number of ranks.
    """
    sizes = axis_sizes(parallel)
    ranks = dist.get_world_size()
    product = 1
    for size in sizes:
        product *= size
    if product != ranks:
        described = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ValueError(f"the plan's mesh is {described} = {product} ranks, but {ranks} ranks were started")
    whole = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    gradient = whole["replicate", "shard", "context"]._flatten("gradient")
    if sizes[3] > 1:
        whole["shard", "context"]._flatten("copy")
    copy = "copy" if sizes[3] > 1 else "shard"
    place = dict(zip(AXES, whole.get_coordinate() or (), strict=True))
    return Mesh(
        whole=whole,
        gradient=gradient,
        tensor=whole["tensor"],
        sharding=whole["replicate", copy] if sizes[1] > 1 else whole[copy],
        data_rank=place["replicate"] * sizes[2] + place["shard"],
        data_ranks=sizes[1] * sizes[2],
        pipeline_rank=place["pipeline"],
        holder=stage_holders(parallel),
        context_rank=place["context"],
        tensor_rank=place["tensor"],
    )


def axis_sizes(parallel: ParallelFacts) -> tuple[int, int, int, int, int]:
    """Sizes of `AXES`. A `zero_group` is made of whole context groups: shard = zero_group / context.

    With stage 0 nothing is sharded, and all data-parallel ranks are replicas.
    """
    shard = parallel.zero_group // parallel.context if parallel.zero_stage > 0 else 1
    replicate = parallel.data // shard
    return parallel.pipeline, replicate, shard, parallel.context, parallel.tensor


def stage_holders(parallel: ParallelFacts) -> tuple[int, ...]:
    """Pipeline rank of every virtual stage, first stage first."""
    holders: dict[int, int] = {}
    for rank in range(parallel.pipeline):
        for stage in stages_of_rank(rank, parallel.pipeline, parallel.virtual_stages, parallel.schedule):
            holders[stage] = rank
    return tuple(holders[stage] for stage in sorted(holders))
