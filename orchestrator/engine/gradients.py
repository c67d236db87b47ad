"""The gradient as one object: its norm over the whole model, and scaling it, on local tensors.

DTensor's own arithmetic would dispatch in Python for every parameter and operation; here each step is a few fused
calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of all gradients that there are."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def counted_once(parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Names of the parameters whose local part this rank counts, so that over all ranks each element counts once.

    An axis on which a parameter is replicated is spoken for by its first rank.
    """
    return frozenset(name for name, parameter in parameters.items() if _counts(parameter))


def _counts(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        raise TypeError("every parameter is a distributed tensor once data parallelism has been applied")
    place: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    return all(
        rank == 0 for rank, placement in zip(place, parameter.placements, strict=True) if placement.is_replicate()
    )


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Sum of squares of all elements, an FP64 scalar on the gradients' device (0 on the CPU if there are none)."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # FP32 even for gradients of 2 bytes, whose own sums of squares would be coarse.
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).double().square().sum()


def clip_factor(norm: float, largest: float) -> float:
    """What a gradient of that norm is multiplied with so that its norm is at most `largest`.

    As `torch.nn.utils.clip_grad_norm_`, its 1e-6 against a norm of 0 included, so that both clip to the same digits.
    """
    return min(1.0, largest / (norm + 1e-6))


def scale(gradients: list[Tensor], factor: float) -> None:
    """Multiply all gradients in place; a factor of 1 costs nothing."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
