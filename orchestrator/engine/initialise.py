"""Initial weights that depend on the seed and the parameter's name, never on how the model is split.

Each parameter is drawn in blocks of rows; the generator is reseeded for each block from (seed, name, block), so a rank
that holds a few rows draws only the blocks they lie in, and no rank ever holds a whole parameter for it. Always drawn
on the host in FP32: the numbers are the same on every device and for every precision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.parameters import ParameterSpec
from orchestrator.engine.gradients import local

BLOCK_ELEMENTS = 1 << 18
"""About how many values a block holds: 1 MiB in FP32. Part of what a seed means; never change it."""
LARGEST_BLOCK_ROWS = 256
"""Most rows of a block, so that narrow parameters are cut as well. Part of what a seed means."""


@torch.no_grad()
def initialise(parameters: Mapping[str, Tensor], specs: Sequence[ParameterSpec], seed: int) -> None:
    """Fill this rank's part of every parameter in place with its initial values.

    Raises KeyError for a parameter that no spec describes, ValueError for one whose whole shape is not its spec's.
    """
    by_name = {spec.name: spec for spec in specs}
    generator = torch.Generator()
    for name, parameter in parameters.items():
        spec = by_name[name]
        if spec.tied_to is not None:
            # Only a pipeline stage without the embedding holds a tied head as a parameter of its own: same values.
            spec = by_name[spec.tied_to]
        if tuple(parameter.shape) != spec.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, its description says {spec.shape}")
        fill(local(parameter), offsets(parameter), spec, seed, generator)


def offsets(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole tensor, by dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]


def fill(part: Tensor, start: Sequence[int], spec: ParameterSpec, seed: int, generator: torch.Generator) -> None:
    """Write into `part`, which begins at `start` of the whole parameter, the values that the seed gives it there."""
    if spec.init.kind == "ones":
        part.fill_(1.0)
        return
    if spec.init.kind == "zeros":
        part.zero_()
        return
    if part.numel() == 0:
        return
    rows, width = spec.shape[0], math.prod(spec.shape[1:])
    block_rows = min(LARGEST_BLOCK_ROWS, max(1, BLOCK_ELEMENTS // width), rows)
    first, end = start[0], start[0] + part.shape[0]
    for block in range(first // block_rows, math.ceil(end / block_rows)):
        low, high = block * block_rows, min((block + 1) * block_rows, rows)
        generator.manual_seed(block_seed(seed, spec.name, block))
        values = torch.empty(high - low, *spec.shape[1:])
        values.normal_(0.0, spec.init.std, generator=generator)
        top, bottom = max(low, first), min(high, end)
        chosen = values[top - low : bottom - low]
        for dim in range(1, part.dim()):
            chosen = chosen.narrow(dim, start[dim], part.shape[dim])
        part[top - first : bottom - first].copy_(chosen)


def block_seed(seed: int, name: str, block: int) -> int:
    """Seed of one block: 63 bits of SHA-256 over seed, name and block."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
