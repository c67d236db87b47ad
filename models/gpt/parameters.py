"""Parameters of the `gpt` family (GPT-2, GPT-3) from its sizes: pure arithmetic.

Owns names, shapes and initial values; refuses sizes that the module cannot build. The module itself is in `module.py`,
how it may be cut in `sharding.py`. Every linear and every LayerNorm has a bias, except the head.
"""

from __future__ import annotations

from models.parameters import (
    Init,
    ModelSizes,
    ParameterSpec,
    SizeProblem,
    attention_specs,
    head_size_problems,
    key_value_heads,
    linear_specs,
    norm_specs,
    residual_std,
    vocabulary_specs,
)

DEFAULT_ATTENTION_BIAS = True
"""GPT's projections have biases."""


def position_spec(sizes: ModelSizes) -> ParameterSpec:
    """The table of learned positions, [max_position_embeddings, hidden_size]; every tensor rank holds all of it."""
    shape = (sizes.max_position_embeddings, sizes.hidden_size)
    init = Init("normal", sizes.initializer_range)
    return ParameterSpec("position_embedding.weight", shape, None, "embedding", False, True, init, None)


def block_specs(sizes: ModelSizes, layer: int) -> tuple[ParameterSpec, ...]:
    """Parameters of block `layer`, in forward order: norm, attention, norm, feed-forward."""
    name = f"layers.{layer}"
    hidden, inner, std = sizes.hidden_size, sizes.intermediate_size, sizes.initializer_range
    return (
        *norm_specs(f"{name}.attention_norm", hidden, layer=layer, part="block", bias=True),
        *attention_specs(sizes, layer, default_bias=DEFAULT_ATTENTION_BIAS),
        *norm_specs(f"{name}.mlp_norm", hidden, layer=layer, part="block", bias=True),
        *linear_specs(f"{name}.mlp.up_proj", inner, hidden, layer=layer, bias=True, cut="outputs", std=std),
        *linear_specs(
            f"{name}.mlp.down_proj", hidden, inner, layer=layer, bias=True, cut="inputs", std=residual_std(sizes)
        ),
    )


def parameter_specs(sizes: ModelSizes) -> tuple[ParameterSpec, ...]:
    """Every parameter of the model in forward order; a tied head is listed with `tied_to`."""
    embedding, head = vocabulary_specs(sizes)
    blocks = (spec for layer in range(sizes.num_hidden_layers) for spec in block_specs(sizes, layer))
    norm = norm_specs("norm", sizes.hidden_size, layer=None, part="head", bias=True)
    return (embedding, position_spec(sizes), *blocks, *norm, head)


def size_problems(sizes: ModelSizes) -> tuple[SizeProblem, ...]:
    """What the module cannot build; empty when all is well."""
    problems = list(head_size_problems(sizes))
    if key_value_heads(sizes) != sizes.num_attention_heads:
        problems.append(
            SizeProblem(
                "num_key_value_heads",
                f"family gpt has as many key and value heads as query heads ({sizes.num_attention_heads}), "
                f"not {key_value_heads(sizes)}.",
                "Leave it null, or use family llama.",
            )
        )
    problems.extend(
        SizeProblem(
            key,
            f"family gpt has learned positions and full attention; {key} does not exist there.",
            "Leave it null, or use family llama.",
        )
        for key in ("rope_scaling", "sliding_window")
        if getattr(sizes, key) is not None
    )
    problems.extend(
        SizeProblem(key, f"family gpt has biases on every projection; {key}=false asks for none.", "Leave it null.")
        for key in ("attention_bias", "attention_output_bias")
        if getattr(sizes, key) is False
    )
    return tuple(problems)
