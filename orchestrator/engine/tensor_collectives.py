"""The four ways in which tensor ranks hand over the residual stream, each with its gradient; plain tensors, no DTensor.

Operations on distributed tensors would dispatch in Python for every product and norm, forward and backward: a third of
a step of a small model. Here only these functions communicate, everything between them is ordinary torch. Shapes:
[batch, sequence, features]; the sequence is what `sequence_parallel` cuts, and divides evenly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.engine.tensor_group import TensorGroup

_SEQUENCE = 1
_OPS = torch.ops._c10d_functional


def _sum(value: Tensor, group: TensorGroup) -> Tensor:
    """Sum over the ranks, on all of them."""
    if torch.compiler.is_compiling():
        traced: Tensor = _OPS.wait_tensor(_OPS.all_reduce(value.contiguous(), "sum", group.name))
        return traced
    # The same without what makes it traceable, which costs as much again in Python.
    result = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group.processes)
    return result


def _put_together(part: Tensor, group: TensorGroup) -> Tensor:
    """Every rank's part of the sequence, in order."""
    parts = _OPS.wait_tensor(_OPS.all_gather_into_tensor(part.contiguous(), group.size, group.name))
    return torch.cat(parts.chunk(group.size), dim=_SEQUENCE)


def _sum_parts(value: Tensor, group: TensorGroup) -> Tensor:
    """This rank's part of the sequence of the sum over the ranks."""
    ordered = torch.cat(value.chunk(group.size, dim=_SEQUENCE))
    result: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(ordered, "sum", group.size, group.name))
    return result


def _own_part(value: Tensor, group: TensorGroup) -> Tensor:
    """This rank's part of the sequence, without the rest behind it."""
    return value.chunk(group.size, dim=_SEQUENCE)[group.rank].contiguous()


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: TensorGroup) -> Tensor:
        context.group = group
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, context.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: TensorGroup) -> Tensor:
        return _sum(value, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: TensorGroup) -> Tensor:
        context.group = group
        return _put_together(value, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_parts(gradient, context.group), None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: TensorGroup) -> Tensor:
        context.group = group
        return _sum_parts(value, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _put_together(gradient, context.group), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: TensorGroup) -> Tensor:
        context.group = group
        return _own_part(value, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _put_together(gradient, context.group), None


def into_cut(stream: Tensor, group: TensorGroup) -> Tensor:
    """The residual stream, whole, in front of products whose outputs are cut: their input gradients are summed."""
    function = _PutTogether if group.cuts_sequence else _SumGradient
    result: Tensor = function.apply(stream, group)  # type: ignore[no-untyped-call]
    return result


def out_of_cut(partial: Tensor, group: TensorGroup) -> Tensor:
    """The residual stream from each rank's summand of it."""
    function = _SumParts if group.cuts_sequence else _Sum
    result: Tensor = function.apply(partial, group)  # type: ignore[no-untyped-call]
    return result


def out_of_whole(value: Tensor, group: TensorGroup) -> Tensor:
    """The residual stream from a value that all ranks have alike."""
    if not group.cuts_sequence:
        return value
    result: Tensor = _OwnPart.apply(value, group)  # type: ignore[no-untyped-call]
    return result
