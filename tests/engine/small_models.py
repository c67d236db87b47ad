"""Small models for tests: ours, on the meta device, zeroed, or random by parameter name."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from torch import Tensor, nn

from models.registry import family
from orchestrator.config.schema.model import ModelConfig


def build_meta(sizes: ModelConfig, **part: Any) -> Any:
    """Our module as its class leaves it: on the meta device."""
    module_name, class_name = family(sizes.family).module.split(":")
    return getattr(importlib.import_module(module_name), class_name)(sizes, **part)


def build_ours(sizes: ModelConfig, dtype: torch.dtype = torch.float32, **part: Any) -> Any:
    """Our module, allocated on the CPU and filled with zeros; buffers computed."""
    model = build_meta(sizes, **part)
    model.to(dtype).to_empty(device="cpu")
    model.initialise_buffers()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def make_sizes(**changes: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**(small | changes))


def build_random(sizes: ModelConfig, dtype: torch.dtype = torch.float64, **part: Any) -> Any:
    """Our module with random values that depend on each parameter's name only, not on what else is held."""
    model = build_ours(sizes, dtype, **part).eval()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model


def tokens_of(sizes: ModelConfig, *shape: int) -> Tensor:
    return torch.randint(sizes.vocab_size, shape, generator=torch.Generator().manual_seed(5))


def matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None
