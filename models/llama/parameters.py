"""Parameters of the `llama` family (LLaMA 1/2/3, Mistral, SmolLM, Qwen2) from its sizes: pure arithmetic.

Owns names, shapes and initial values; refuses sizes that the module cannot build. The module itself is in `module.py`,
how it may be cut in `sharding.py`.
"""

from __future__ import annotations

from models.parameters import (
    ModelSizes,
    ParameterSpec,
    SizeProblem,
    attention_specs,
    head_features,
    head_size_problems,
    linear_specs,
    norm_specs,
    residual_std,
    vocabulary_specs,
)

DEFAULT_ATTENTION_BIAS = False
"""LLaMA's projections have no biases; Qwen2 sets `attention_bias`."""


def block_specs(sizes: ModelSizes, layer: int) -> tuple[ParameterSpec, ...]:
    """Parameters of block `layer`, in forward order: norm, attention, norm, gated feed-forward."""
    name = f"layers.{layer}"
    hidden, inner, std = sizes.hidden_size, sizes.intermediate_size, sizes.initializer_range
    return (
        *norm_specs(f"{name}.attention_norm", hidden, layer=layer, part="block", bias=False),
        *attention_specs(sizes, layer, default_bias=DEFAULT_ATTENTION_BIAS),
        *norm_specs(f"{name}.mlp_norm", hidden, layer=layer, part="block", bias=False),
        *linear_specs(f"{name}.mlp.gate_proj", inner, hidden, layer=layer, bias=False, cut="outputs", std=std),
        *linear_specs(f"{name}.mlp.up_proj", inner, hidden, layer=layer, bias=False, cut="outputs", std=std),
        *linear_specs(
            f"{name}.mlp.down_proj", hidden, inner, layer=layer, bias=False, cut="inputs", std=residual_std(sizes)
        ),
    )


def parameter_specs(sizes: ModelSizes) -> tuple[ParameterSpec, ...]:
    """Every parameter of the model in forward order; a tied head is listed with `tied_to`."""
    embedding, head = vocabulary_specs(sizes)
    blocks = (spec for layer in range(sizes.num_hidden_layers) for spec in block_specs(sizes, layer))
    norm = norm_specs("norm", sizes.hidden_size, layer=None, part="head", bias=False)
    return (embedding, *blocks, *norm, head)


def size_problems(sizes: ModelSizes) -> tuple[SizeProblem, ...]:
    """What the module cannot build; empty when all is well."""
    problems = list(head_size_problems(sizes))
    if head_features(sizes) % 2:
        problems.append(
            SizeProblem(
                "head_dim",
                f"rotary positions turn pairs of features, and a head has {head_features(sizes)}, an odd number.",
                "Use an even head_dim.",
            )
        )
    scaling = sizes.rope_scaling
    if scaling is not None and scaling.rope_type == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        problems.append(
            SizeProblem(
                "rope_scaling.high_freq_factor",
                f"high_freq_factor={scaling.high_freq_factor:g} is not above low_freq_factor="
                f"{scaling.low_freq_factor:g}: frequencies are blended between the two.",
                "LLaMA 3.1 uses 4 and 1.",
            )
        )
    return tuple(problems)
