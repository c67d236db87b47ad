"""Data parallelism: how ranks that see different samples keep the same weights, and the only place that sets its
switches.

Stage 0 is torch's composable `replicate`: each rank holds all weights, gradients are summed once an optimizer step. The
sum is never divided here (the loss already is, by the whole batch's valid tokens). Every parameter becomes a DTensor,
so that optimizer, checkpoint and counting see one kind of tensor. Switches of a step are set by `begin_micro_batch`
alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from orchestrator.engine.mesh import Mesh


def apply_replicate(model: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy, bucket_bytes: int | None) -> None:
    """Wrap the model for stage 0, in place; its parameters may still be on the meta device.

    Gradients are summed bucket by bucket during the backward pass: consecutive layers of at least `bucket_bytes` of
    FP32 gradients make a bucket, and what is outside of the layers the last one. None: one bucket for the whole model.
    """
    if bucket_bytes is not None:
        for bucket in _buckets(list(model.layers.values()), bucket_bytes):  # type: ignore[operator]
            replicate(bucket, mesh=mesh.gradient, mp_policy=policy)
    replicate(model, mesh=mesh.gradient, mp_policy=policy)
    _sum_gradients(model)


def begin_micro_batch(model: nn.Module, *, last: bool) -> None:
    """Set the switches for the next forward and backward: gradients are summed over ranks after the last one only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def end_evaluation(model: nn.Module) -> None:
    """Drop the copies of weights that a forward pass without a backward leaves: they would be stale after the next
    step."""
    for module in wrapped_modules(model):
        module.reshard()


def wrapped_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that data parallelism has wrapped, outermost first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _sum_gradients(model: nn.Module) -> None:
    # A sum, never a mean: the divisor of the loss is the number of valid tokens of the whole global batch. Forcing
    # plain sums keeps torch from a pre-multiplied sum, which gloo does not have.
    for module in wrapped_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _buckets(layers: list[nn.Module], bucket_bytes: int) -> list[list[nn.Module]]:
    buckets: list[list[nn.Module]] = []
    filled = bucket_bytes
    for layer in layers:
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(layer)
        filled += sum(parameter.numel() for parameter in layer.parameters()) * 4
    return buckets
