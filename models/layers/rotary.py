"""Rotary positions (Su et al. 2021, RoFormer) in the half-split convention of Hugging Face's LLaMA.

Owns the tables of cosines and sines and their application. Feature i of a head is turned together with feature
i + head_dim / 2 (not i + 1 as in Meta's release: query and key weights of the two conventions are permuted).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.parameters import ModelSizes, RopeScaling, head_features

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, each [s, head_dim / 2] or [b, s, head_dim / 2]; they may be longer than the sequence."""


def frequencies(features: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype) -> Tensor:
    """Radians a token of every pair of features, [features / 2].

    `linear` divides all of them by the factor. `llama3` divides those whose wavelength is longer than
    original / low_freq_factor tokens, leaves those shorter than original / high_freq_factor, and blends in between
    (Grattafiori et al. 2024, The Llama 3 Herd of Models, and the reference code published with LLaMA 3.1).
    """
    plain = 1.0 / theta ** (torch.arange(0, features, 2, dtype=dtype) / features)
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


class RotaryTables(nn.Module):
    """Cosines and sines of every position, [length, head_dim / 2] in FP32, outside the state dict.

    They are buffers on the model's device; `fill` computes them, again after every `to_empty`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: ModelSizes, length: int) -> None:
        super().__init__()
        self.features = head_features(sizes)
        self.theta = sizes.rope_theta
        self.scaling = sizes.rope_scaling
        shape = (length, self.features // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)

    def fill(self) -> None:
        """Compute both tables on their device; angles never in less than FP32, whatever the model was cast to."""
        dtype = torch.float64 if self.cos.dtype == torch.float64 else torch.float32
        with torch.device(self.cos.device), torch.no_grad():
            positions = torch.arange(self.cos.shape[0], dtype=dtype)
            angles = torch.outer(positions, frequencies(self.features, self.theta, self.scaling, dtype))
            self.cos.copy_(angles.cos())
            self.sin.copy_(angles.sin())

    def forward(self, positions: Tensor | None = None) -> Tables:
        """Tables for `positions` ([s] or [b, s], global); without them the whole tables, for a sequence from 0 on."""
        if positions is None:
            return self.cos, self.sin
        return self.cos[positions], self.sin[positions]


def rotate(heads: Tensor, tables: Tables) -> Tensor:
    """Turn `heads` [b, s, n, d] by the first s rows of `tables`; same shape and dtype.

    Raises:
        ValueError: the sequence is longer than the tables.
    """
    length = heads.shape[1]
    if length > tables[0].shape[-2]:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the {tables[0].shape[-2]} positions of the model"
        )
    cos, sin = (table[..., :length, None, :].to(heads.dtype) for table in tables)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
