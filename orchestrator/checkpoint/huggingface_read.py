"""Hugging Face weights straight into this rank's shards: each rank reads the rows and columns that it holds.

No more than a block of a tensor is held beside the shard, and values are cast to the parameter's own type on the way.
Names, shapes and files are judged in `huggingface_folder.py`; which part a rank holds is the engine's business
(`engine/start_weights.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.checkpoint.huggingface_folder import Source
from orchestrator.checkpoint.safetensors_file import StoredTensor, read_blocks

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Words of the format -> torch's."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of one parameter."""

    values: Tensor
    """Filled in place; a block of the whole parameter, on any device and of any type."""
    start: tuple[int, ...]
    """Where the block begins in the whole parameter, by dimension."""
    shape: tuple[int, ...]
    """Of the whole parameter."""


@torch.no_grad()
def fill(parts: Mapping[str, Part], sources: Mapping[str, Source]) -> None:
    """Read every part from where its parameter lies.

    Raises KeyError for a part without a source, OSError for a file that cannot be read.
    """
    for name, part in parts.items():
        _fill(part, sources[name])


def read_whole(tensor: StoredTensor) -> Tensor:
    """A whole tensor in its stored type."""
    values = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    for first, rows, data in read_blocks(tensor, (0,) * len(tensor.shape), tensor.shape):
        values[first : first + rows] = _block(data, tensor, (rows, *tensor.shape[1:]))
    return values


def _fill(part: Part, source: Source) -> None:
    weight, tensor = source.weight, source.tensor
    # A part may be longer than what is left of the parameter: rows that only pad a shard keep their values.
    extent = tuple(
        min(size, whole - first) for size, whole, first in zip(part.values.shape, part.shape, part.start, strict=True)
    )
    if min(extent) <= 0:
        return
    start = (part.start[0] + weight.part * part.shape[0], *part.start[1:])
    values = part.values[tuple(slice(0, size) for size in extent)]
    if weight.transposed:
        start, extent, values = start[::-1], extent[::-1], values.t()
    for first, rows, data in read_blocks(tensor, start, extent):
        values[first : first + rows].copy_(_block(data, tensor, (rows, *extent[1:])))


def _block(data: bytearray, tensor: StoredTensor, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).view(shape)
