"""Data parallelism: how ranks that see different samples keep the same weights; the only place that sets its switches.

Stage 0 is torch's composable `replicate`: each rank holds all weights. Stages 1 to 3 are `fully_shard`: weights,
gradients and optimizer state are cut over the ranks of a `zero_group`, and the stage says what stays whole between the
micro-batches of a step. Gradients are summed, never averaged: the loss already is divided by the whole batch's valid
tokens. Every parameter becomes a DTensor, so that optimizer, checkpoint and counting see one kind of tensor.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from models.parameters import ShardingTable
from orchestrator.config.schema import ParallelConfig
from orchestrator.engine.mesh import Mesh
from orchestrator.plan.schedules import SPLIT_BACKWARDS

BUCKET_BYTES: dict[str, int | None] = {"cpu": None, "cuda": 128 * 2**20}
"""Stage 0: gradient bytes (FP32) of one all-reduce, by device; None: the whole model at once. gloo on a CPU cannot
overlap with compute, so fewer calls win there; on GPUs buckets overlap with the rest of the backward pass."""


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The wrapped modules of a rank's part of the model, and the switches that each micro-batch needs.

    What is whole (w) or cut (c) between two micro-batches, and when gradients are reduced:

    | stage | weights | gradients | reduced |
    |---|---|---|---|
    | 0 | w | w | once a step |
    | 1 | w | w | once a step |
    | 2 | w | c | each micro-batch |
    | 3 | c | c | each micro-batch |

    From stage 1 on weights and gradients are cut when the step ends, and so is the optimizer's state always. Replicas
    of a sharded copy (`zero_group` smaller than the data ranks) are summed once a step in every stage.
    """

    modules: tuple[FSDPModule, ...]
    """Outermost first."""
    zero_stage: int
    interleaved: bool
    """Whether forward passes of later micro-batches run before the backward pass of earlier ones (pipeline)."""

    def begin_micro_batch(self, *, last: bool) -> None:
        """Set all switches for the next forward and backward; `last` of the step."""
        root = self.modules[0]
        # The order of units, by which weights are gathered ahead, is forgotten after each backward pass, or it would
        # name the micro-batch before. In a pipeline later micro-batches have begun by then, and it is kept to the
        # step's end.
        root.set_is_last_backward(last or not self.interleaved)
        root.set_requires_gradient_sync(last or self.zero_stage >= 2)
        root.set_requires_all_reduce(last)
        # Weights that stayed whole across the optimizer's step would be stale: they are cut after the last backward.
        root.set_reshard_after_backward(last or self.zero_stage == 3)

    def end_evaluation(self) -> None:
        """Drop whole weights that a forward pass without a backward leaves: they would be stale after the next step."""
        for module in self.modules:
            module.reshard()


def apply_data_parallel(
    model: nn.Module,
    mesh: Mesh,
    parallel: ParallelConfig,
    table: ShardingTable,
    policy: MixedPrecisionPolicy,
) -> DataParallel:
    """Wrap a stage of the model in place for its ZeRO stage; its parameters may still be on the meta device.

    Under the schedules that split a backward pass (`SPLIT_BACKWARDS`) torch keeps weights and gradients whole
    within a step: stages 2 and 3 are then stage 1.
    """
    device = mesh.whole.device_type
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if parallel.offload == "all" else OffloadPolicy()
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    # Embeddings behind tensor parallelism return views. Nothing of ours changes a module's output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    split = parallel.pipeline > 1 and parallel.schedule in SPLIT_BACKWARDS
    zero_stage = min(parallel.zero_stage, 1) if split else parallel.zero_stage
    if zero_stage == 0:
        options |= {"mesh": mesh.gradient}
        for bucket in _buckets(_units(model, table), BUCKET_BYTES[device]):
            replicate(bucket, **options)
        replicate(model, **options)
    else:
        options |= {"mesh": mesh.sharding, "reshard_after_forward": zero_stage == 3}
        for unit in _units(model, table):
            fully_shard(unit, **options)
        fully_shard(model, **options)
    wrapped = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
    for module in wrapped:
        # A plain sum. Forcing it keeps torch from a pre-multiplied sum, which gloo does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return DataParallel(wrapped, zero_stage, interleaved=parallel.pipeline > 1)


def _units(model: nn.Module, table: ShardingTable) -> list[list[nn.Module]]:
    """Modules that are gathered and reduced together, in forward order, of those that this stage holds.

    A group of plain names is one unit; a pattern gives a unit for each module that it matches.
    """
    names = {name: module for name, module in model.named_modules() if module is not None}
    units: list[list[nn.Module]] = []
    for group in table.units:
        if any("*" in pattern for pattern in group):
            depth = group[0].count(".")
            units += [
                [module]
                for name, module in names.items()
                if name.count(".") == depth and any(fnmatchcase(name, pattern) for pattern in group)
            ]
        elif held := [names[name] for name in group if name in names]:
            units.append(held)
    return units


def _buckets(units: list[list[nn.Module]], bucket_bytes: int | None) -> list[list[nn.Module]]:
    """Consecutive units joined until each bucket has `bucket_bytes` of FP32 gradients; None: no buckets at all."""
    if bucket_bytes is None:
        return []
    buckets: list[list[nn.Module]] = []
    filled = bucket_bytes
    for unit in units:
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1] += unit
        filled += 4 * sum(parameter.numel() for module in unit for parameter in module.parameters())
    return buckets
