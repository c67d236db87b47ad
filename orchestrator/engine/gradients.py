"""The gradient as one object: its norm over the whole model, and scaling it, on local tensors.

DTensor's own arithmetic would dispatch in Python for every parameter and operation; here each step is a few fused
calls.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of all gradients that there are."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Sum of squares of all elements, an FP64 scalar on the gradients' device (0 on the CPU if there are none)."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def scale(gradients: list[Tensor], factor: float) -> None:
    """Multiply all gradients in place; a factor of 1 costs nothing."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
