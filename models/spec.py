"""Front door of the models' pure half: sizes in, parameters, counts and FLOPs out. No torch, no `orchestrator`.

The values are defined in `models/parameters.py`, the families in `models/registry.py`.
"""

from __future__ import annotations

from models.parameters import (
    Init,
    ModelSizes,
    ParameterSpec,
    Part,
    RopeScaling,
    ShardingTable,
    SizeProblem,
    Style,
    head_features,
    key_value_heads,
)
from models.registry import family

__all__ = [
    "Init",
    "ModelSizes",
    "ParameterSpec",
    "Part",
    "RopeScaling",
    "ShardingTable",
    "SizeProblem",
    "Style",
    "flops_per_token",
    "head_features",
    "key_value_heads",
    "matmul_parameters",
    "parameter_count",
    "parameter_specs",
]


def parameter_specs(sizes: ModelSizes) -> tuple[ParameterSpec, ...]:
    """Every parameter of the model in forward order; a tied head is listed with `tied_to`."""
    return family(sizes.family).parameter_specs(sizes)


def parameter_count(sizes: ModelSizes) -> int:
    """Parameters of the whole model, tied ones once."""
    return sum(spec.numel for spec in parameter_specs(sizes) if spec.tied_to is None)


def matmul_parameters(sizes: ModelSizes) -> int:
    """Parameters each token is multiplied with: linear weights and the head (tied or not), not look-ups."""
    return sum(spec.numel for spec in parameter_specs(sizes) if spec.matmul)


def flops_per_token(sizes: ModelSizes, sequence_length: int) -> float:
    """Floating-point operations of forward and backward for one token of a sequence of that many tokens.

    6 x matmul parameters + 12 x L x h x s (PaLM, Chowdhery et al. 2022, appendix B), with h = heads x head_dim, which
    is the hidden size except where `head_dim` says otherwise. No recompute; neither causal mask nor sliding window is
    deducted, so that figures of different models compare: what a window shorter than the sequence saves shows as a
    higher MFU.
    """
    width = sizes.num_attention_heads * head_features(sizes)
    return 6.0 * matmul_parameters(sizes) + 12.0 * sizes.num_hidden_layers * width * sequence_length
