"""Our modules compute what transformers' modules compute from the same weights: logits and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.config.schema.model import ModelConfig, RopeScaling
from tests.engine.models_against_transformers import build_pair, largest_gradient_difference

pytestmark = pytest.mark.torch

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
LLAMA_CASES: dict[str, dict[str, Any]] = {
    "as many key and value heads as query heads": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key and value head": {"num_key_value_heads": 1},
    "tied head": {"tie_word_embeddings": True},
    "llama3 rope": {
        "rope_theta": 5e5,
        "rope_scaling": RopeScaling(rope_type="llama3", factor=8, original_max_position_embeddings=16),
    },
    "linear rope": {"rope_scaling": RopeScaling(rope_type="linear", factor=2)},
    "all attention biases": {"attention_bias": True},
    "Qwen2 (no output bias)": {"attention_bias": True, "attention_output_bias": False, "num_key_value_heads": 2},
    "Qwen2 with a window": {"attention_bias": True, "attention_output_bias": False, "sliding_window": 9},
    "Mistral (window inside the sequence)": {"sliding_window": 7, "num_key_value_heads": 2},
    "Mistral (window beyond the sequence)": {"sliding_window": 70},
    "heads wider than hidden / heads": {"head_dim": 16},
    "heads narrower than hidden / heads": {"head_dim": 4, "num_key_value_heads": 3},
}
GPT_CASES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "own width": {"intermediate_size": 70},
}
SHAPES = [(3, 33), (1, 64), (2, 1)]
"""Sequences and tokens: ragged, the longest one, and a single token."""


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run_both(
    sizes: ModelConfig, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, nn.Module, nn.Module]:
    ours, theirs = build_pair(sizes, dtype)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(sizes.vocab_size, shape, generator=generator) for _ in range(2))
    logits, expected = ours(tokens), theirs(tokens, use_cache=False).logits
    torch.autograd.backward([loss(logits, labels), loss(expected, labels)])
    return logits.detach(), expected.detach(), ours, theirs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("changes", LLAMA_CASES.values(), ids=LLAMA_CASES)
def test_llama_logits_are_bit_equal_and_gradients_agree_in_fp32(
    changes: dict[str, Any], shape: tuple[int, int]
) -> None:
    """Gradients are bit-equal too, except where transformers repeats the keys and we group the queries (window)."""
    sizes = ModelConfig(**(SMALL | changes))
    logits, expected, ours, theirs = run_both(sizes, shape, torch.float32)
    assert torch.equal(logits, expected)
    difference, name = largest_gradient_difference(sizes, ours, theirs)
    assert difference <= (1e-6 if sizes.sliding_window else 0.0), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("changes", GPT_CASES.values(), ids=GPT_CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=["fp64", "fp32"])
def test_gpt_logits_and_gradients_agree(
    changes: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """Not bit-equal (one fused, transposed product and GELU written out there); FP64 shows that they are the same."""
    sizes = ModelConfig(family="gpt", **(SMALL | changes))
    logits, expected, ours, theirs = run_both(sizes, shape, dtype)
    assert float((logits - expected).abs().max() / expected.abs().max()) <= tolerance
    difference, name = largest_gradient_difference(sizes, ours, theirs)
    assert difference <= tolerance, name


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_bf16_logits_are_no_further_from_exact_ones_than_those_of_transformers(family: str) -> None:
    sizes = ModelConfig(family=family, **SMALL)
    exact = run_both(sizes, (3, 33), torch.float64)[0]
    logits, expected, _, _ = run_both(sizes, (3, 33), torch.bfloat16)
    ours, theirs = ((value.double() - exact).abs().mean() for value in (logits, expected))
    assert ours <= 1.1 * theirs


def test_a_wrong_rotary_convention_would_be_seen() -> None:
    """The comparison can fail: permuting the halves of each head (Meta's convention) changes the logits."""
    sizes = ModelConfig(**SMALL)
    ours, theirs = build_pair(sizes)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                interleaved = parameter.view(6, 4, 2, -1).transpose(1, 2).flatten(0, 2)
                parameter.copy_(interleaved)
        assert not torch.allclose(ours(tokens), theirs(tokens).logits, rtol=1e-2)
