"""One model twice: ours and transformers', with the same weights, so that tests can compare them.

The transformers model is built from the `config.json` that we write, and its weights are copied through our table of
foreign names: both are part of what is tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.huggingface import ForeignWeight
from models.registry import family
from orchestrator.config.schema.model import ModelConfig
from tests.engine.small_models import build_ours


def build_theirs(sizes: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of these sizes, every parameter random (biases and norms included), no dropout."""
    config_json, refused = family(sizes.family).config_from_sizes(sizes)
    assert refused == ()
    kind = config_json.pop("model_type")
    config = AutoConfig.for_model(kind, **config_json)
    build: Any = AutoModelForCausalLM.from_config
    theirs = build(config, attn_implementation="sdpa", dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in theirs.named_parameters():
        mean, std = (1.0, 0.2) if "norm.weight" in name or "layernorm.weight" in name else (0.0, 0.1)
        nn.init.normal_(parameter, mean, std, generator=generator)
    return theirs.eval()


def foreign_block(weight: ForeignWeight, tensor: Tensor) -> Tensor:
    """The part of a foreign tensor that is our parameter, in our orientation."""
    tensor = tensor.t() if weight.transposed else tensor
    return tensor.chunk(weight.parts, dim=0)[weight.part]


def build_pair(sizes: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(ours, theirs) with equal weights."""
    ours, theirs = build_ours(sizes, dtype), build_theirs(sizes, dtype)
    mine, foreign = dict(ours.named_parameters()), dict(theirs.named_parameters())
    with torch.no_grad():
        for weight in family(sizes.family).foreign_weights(sizes):
            mine[weight.name].copy_(foreign_block(weight, foreign[weight.foreign]))
    return ours.eval(), theirs


def largest_gradient_difference(sizes: ModelConfig, ours: nn.Module, theirs: nn.Module) -> tuple[float, str]:
    """Largest max|difference| / max|gradient| over the parameters, and the parameter's name."""
    mine, foreign = dict(ours.named_parameters()), dict(theirs.named_parameters())
    worst = (0.0, "")
    for weight in family(sizes.family).foreign_weights(sizes):
        gradient, expected = mine[weight.name].grad, foreign[weight.foreign].grad
        assert gradient is not None and expected is not None, weight.name
        block = foreign_block(weight, expected)
        # Measured against the whole foreign tensor: the gradient of a key bias is zero but for rounding.
        worst = max(worst, (float((gradient - block).abs().max() / expected.abs().max()), weight.name))
    return worst
