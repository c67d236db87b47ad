"""Dropout over tensor ranks: the same mask where they hold the same, masks of their own where each holds a part.

Tensor ranks draw from one stream of random numbers, seeded alike for a step (`compute.seed_step`): whatever all of them
compute on the same tensor drops the same elements. Where each has its own heads or its own part of the sequence, a
module draws from a stream that forks off there: its seed is the next number of the common stream, mixed with the tensor
rank, and the common stream goes on behind it. A recomputation that starts from the same state draws the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from orchestrator.engine.initialise import block_seed


class OwnMasks(ParallelStyle):
    """A module that draws masks for what this tensor rank alone holds."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if _probability(module) > 0:
            module.forward = _forked(module, module.forward, device_mesh.get_local_rank())
        return module


def _probability(module: nn.Module) -> float:
    """Of `nn.Dropout`, of attention with dropout inside, and 0 of what stands in its place."""
    return float(getattr(module, "p", getattr(module, "dropout", 0.0)))


def _forked(module: nn.Module, forward: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def with_own_masks(*inputs: Any, **options: Any) -> Any:
        if not module.training:
            return forward(*inputs, **options)
        with own_stream(inputs[0].device, rank):
            return forward(*inputs, **options)

    # Generators cannot be set inside of a compiled graph; it ends before this module and begins anew behind it.
    outside: Callable[..., Any] = torch.compiler.disable(with_own_masks)  # type: ignore[no-untyped-call]
    return outside


@contextmanager
def own_stream(device: torch.device, rank: int) -> Iterator[None]:
    """Within, `device` draws from a stream of this rank's own; collective in that all ranks take the same number."""
    with unset_fake_temporarily():
        common = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    state = generator.get_state()
    generator.manual_seed(block_seed(common, "tensor rank", rank))
    try:
        yield
    finally:
        generator.set_state(state)
