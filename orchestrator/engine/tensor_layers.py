"""What a layer computes with its own part of its parameters, as styles for `tensor_parallel.py`.

Parameters stay distributed tensors, so that norm, clipping and checkpoints count each element once; each layer's own
forward is replaced (not the module, so that names stay) by one that takes the plain part of them. Knows linear layers,
embeddings and the two norms; refuses every other kind by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from orchestrator.engine.tensor_collectives import into_cut, out_of_cut, out_of_whole
from orchestrator.engine.tensor_group import TensorGroup, tensor_group

Forward = Callable[..., Tensor]


def own(parameter: Tensor | None, gradient: Placement | None = None) -> Tensor | None:
    """This rank's part of a parameter, for autograd. `gradient`: what the part's gradient is of the whole one's; None:
    the same part of it."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local(grad_placements=None if gradient is None else [gradient])
    part: Tensor = _Own.apply(parameter, gradient)  # type: ignore[no-untyped-call]
    return part


class _Own(torch.autograd.Function):
    """`DTensor.to_local` for a part that is contiguous, as its gradient is: what that works out anew for every weight
    and micro-batch about the gradient's layout is known here, and was a quarter of a small stage's time in Python."""

    @staticmethod
    def forward(context: Any, parameter: DTensor, gradient: Placement | None) -> Tensor:
        context.spec = parameter._spec if gradient is None else _gradient_spec(parameter._spec, gradient)
        part = parameter._local_tensor
        return part.view_as(part)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A specification of its own: torch writes into them.
        spec = copy(context.spec)
        return DTensor(gradient.contiguous(), spec, requires_grad=False), None  # type: ignore[no-untyped-call]


@cache
def _gradient_spec(parameter: DTensorSpec, gradient: Placement) -> DTensorSpec:
    """How the gradient of a parameter lies over the ranks, if not as the parameter does."""
    return DTensorSpec(parameter.mesh, (gradient,), tensor_meta=parameter.tensor_meta)


def distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Make the module's own parameters distributed tensors: as `placements` says by name, else replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placements.get(name, Replicate())
        # Nobody's values are sent: they are drawn later, each rank its own part.
        whole = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


class _LayerStyle(ParallelStyle):
    """Distributes a layer's parameters and replaces its forward."""

    def __init__(self, *, cuts_sequence: bool) -> None:
        super().__init__()
        self.cuts_sequence = cuts_sequence

    placements: dict[str, Placement] = {}  # noqa: RUF012 - read only
    """How each parameter lies over the ranks; those that are not named are replicated."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, self.placements)
        module.forward = self.forward_of(
            module, device_mesh, tensor_group(device_mesh, cuts_sequence=self.cuts_sequence)
        )
        return module

    @abstractmethod
    def forward_of(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup) -> Forward:
        """What the layer computes from now on."""


class Colwise(_LayerStyle):
    """A product whose outputs are cut; its input is whole (`GatherInput` in front of it)."""

    placements = {"weight": Shard(0), "bias": Shard(0)}  # noqa: RUF012

    def forward_of(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup) -> Forward:
        """[b, s, features] -> [b, s, own outputs]."""
        _require(module, nn.Linear)

        def forward(inputs: Tensor) -> Tensor:
            return functional.linear(inputs, own(module.weight), own(module.bias))  # type: ignore[arg-type]

        return forward


class Rowwise(_LayerStyle):
    """A product whose inputs are cut; the ranks' summands become the residual stream, the bias is added once."""

    placements = {"weight": Shard(1)}  # noqa: RUF012

    def forward_of(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup) -> Forward:
        """[b, s, own inputs] -> the stream."""
        _require(module, nn.Linear)
        of_bias = Partial() if group.cuts_sequence else None

        def forward(inputs: Tensor) -> Tensor:
            stream = out_of_cut(functional.linear(inputs, own(module.weight)), group)  # type: ignore[arg-type]
            return stream if module.bias is None else stream + own(module.bias, of_bias)  # type: ignore[arg-type,operator]

        return forward


class Norm(_LayerStyle):
    """A norm of what this rank holds of the stream; with a cut sequence its gradients are summands."""

    def forward_of(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup) -> Forward:
        """The stream -> the stream."""
        kind = Partial() if group.cuts_sequence else None
        if isinstance(module, nn.RMSNorm):
            return lambda stream: functional.rms_norm(
                stream, module.normalized_shape, own(module.weight, kind), module.eps
            )
        _require(module, nn.LayerNorm)
        return lambda stream: functional.layer_norm(
            stream,
            module.normalized_shape,  # type: ignore[arg-type]
            own(module.weight, kind),  # type: ignore[arg-type]
            own(module.bias, kind),  # type: ignore[arg-type]
            module.eps,  # type: ignore[arg-type]
        )


class WholeEmbedding(_LayerStyle):
    """A table that every rank has whole; of what it gives, each keeps its part of the stream."""

    def forward_of(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup) -> Forward:
        """Ids [b, s] -> the stream."""
        _require(module, nn.Embedding)
        return lambda ids: out_of_whole(functional.embedding(ids, own(module.weight)), group)  # type: ignore[arg-type]


class CutEmbedding(_LayerStyle):
    """A table whose rows are cut: each rank looks up the ids that it holds, the others are zero there."""

    placements = {"weight": Shard(0)}  # noqa: RUF012

    def forward_of(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup) -> Forward:
        """Ids [b, s] -> the stream."""
        _require(module, nn.Embedding)
        shape, offsets = compute_local_shape_and_global_offset(module.weight.shape, mesh, [Shard(0)])  # type: ignore[arg-type]
        rows, first = shape[0], offsets[0]

        def forward(ids: Tensor) -> Tensor:
            index = ids - first
            elsewhere = (index < 0) | (index >= rows)
            found = functional.embedding(index.masked_fill(elsewhere, 0), own(module.weight))  # type: ignore[arg-type]
            return out_of_cut(found.masked_fill_(elsewhere[..., None], 0.0), group)

        return forward


class GatherInput(ParallelStyle):
    """A module without parameters of its own whose first input becomes whole, once for all products inside of it."""

    def __init__(self, *, cuts_sequence: bool) -> None:
        super().__init__()
        self.cuts_sequence = cuts_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = tensor_group(device_mesh, cuts_sequence=self.cuts_sequence)

        def whole(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return into_cut(inputs[0], group), *inputs[1:]

        module.register_forward_pre_hook(whole)
        return module


class CutHead(_LayerStyle):
    """The output head, cut by rows of its weight; `head.py` puts a forward of its own in place."""

    placements = {"weight": Shard(0)}  # noqa: RUF012

    def forward_of(self, module: nn.Module, mesh: DeviceMesh, group: TensorGroup) -> Forward:
        """[b, s, features] -> [b, s, own rows]; the input becomes whole in front of it, and its gradient is summed."""
        _require(module, nn.Linear)
        GatherInput(cuts_sequence=group.cuts_sequence)._apply(module, mesh)
        return lambda hidden: functional.linear(hidden, own(module.weight))  # type: ignore[arg-type]


def _require(module: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(module, kind):
        raise TypeError(f"tensor parallelism knows {kind.__name__} here, not {type(module).__name__}")
