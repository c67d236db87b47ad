"""The `gpt` family in Hugging Face's words (GPT-2): weights' names and `config.json`, both ways. Pure.

GPT-2 keeps query, key and value in one tensor and every projection as [inputs, outputs]; `ForeignWeight` says so, and
whoever reads the tensors cuts and transposes. Refuses each value that `module.py` does not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.gpt.parameters import parameter_specs
from models.huggingface import ConfigReader, ForeignWeight, ImportedSizes, Refusal
from models.parameters import ModelSizes, head_features

IGNORED_WEIGHTS = ("*.attn.bias", "*.attn.masked_bias")
"""Patterns of foreign tensors that are no parameters: published GPT-2 files keep the causal mask."""

PREFIX = "transformer."
"""Beginning of every name but the head's; files written by the bare model (the published ones) lack it."""

OUTSIDE_BLOCKS = {
    "embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
INSIDE_BLOCKS = {
    "attention_norm": "ln_1",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
FUSED = {"attention.q_proj": 0, "attention.k_proj": 1, "attention.v_proj": 2}
"""Our projections inside `attn.c_attn`, in order along its outputs."""


def foreign_weights(sizes: ModelSizes) -> tuple[ForeignWeight, ...]:
    """One entry a parameter with values of its own (a tied head has none and is absent in the foreign file)."""
    return tuple(foreign_weight(spec.name) for spec in parameter_specs(sizes) if spec.tied_to is None)


def foreign_weight(name: str) -> ForeignWeight:
    """Where GPT-2 keeps our parameter of that name."""
    if name in OUTSIDE_BLOCKS:
        return ForeignWeight(name, OUTSIDE_BLOCKS[name])
    _, index, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    transposed = kind == "weight" and not module.endswith("norm")
    if module in FUSED:
        return ForeignWeight(name, f"transformer.h.{index}.attn.c_attn.{kind}", transposed, FUSED[module], len(FUSED))
    return ForeignWeight(name, f"transformer.h.{index}.{INSIDE_BLOCKS[module]}.{kind}", transposed)


def sizes_from_config(config: Mapping[str, Any]) -> ImportedSizes:
    """Read a `config.json` of model_type gpt2."""
    reader = ConfigReader(config)
    reader.expect("model_type", ("gpt2",), "family gpt reads gpt2")
    reader.expect("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "the activation is GELU (tanh form)")
    reader.expect("scale_attn_weights", (True,), "attention scores are scaled by 1 / sqrt(head_dim)")
    reader.expect("scale_attn_by_inverse_layer_idx", (False,), "attention scores are scaled alike in every layer")
    reader.expect("reorder_and_upcast_attn", (False,), "attention is computed in the precision of the training")
    reader.expect("add_cross_attention", (False,), "there is no encoder")
    reader.expect("quantization_config", (None,), "weights are not quantised")
    reader.expect("auto_map", (None,), "code that comes with a checkpoint is not run")
    for key in ("n_ctx", "summary_type", "summary_use_proj", "summary_activation"):
        reader.take(key, None)
    for key in ("summary_proj_to_labels", "summary_first_dropout"):
        reader.take(key, None)
    hidden = reader.need("n_embd")
    dropout = reader.take("resid_pdrop", 0.1)
    if reader.take("embd_pdrop", 0.1) != dropout:
        reader.refused.append(("embd_pdrop", f"must equal resid_pdrop={dropout}: both are one number here"))
    sizes = {
        "family": "gpt",
        "hidden_size": hidden,
        "intermediate_size": reader.take("n_inner", None) or (hidden and 4 * hidden),
        "num_hidden_layers": reader.need("n_layer"),
        "num_attention_heads": reader.need("n_head"),
        "num_key_value_heads": None,
        "head_dim": None,
        "vocab_size": reader.need("vocab_size"),
        "max_position_embeddings": reader.take("n_positions", 1024),
        "rms_norm_eps": reader.take("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": reader.take("tie_word_embeddings", True),
        "attention_bias": None,
        "attention_dropout": reader.take("attn_pdrop", 0.1),
        "resid_pdrop": dropout,
        "initializer_range": reader.take("initializer_range", 0.02),
    }
    return reader.finish(sizes)


def config_from_sizes(sizes: ModelSizes) -> tuple[dict[str, Any], tuple[Refusal, ...]]:
    """The `config.json` of these sizes, and what GPT-2's class cannot express of them."""
    refused: list[Refusal] = []
    if head_features(sizes) * sizes.num_attention_heads != sizes.hidden_size:
        refused.append(("head_dim", "must be hidden_size / num_attention_heads in GPT-2"))
    config: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": sizes.hidden_size,
        "n_inner": sizes.intermediate_size,
        "n_layer": sizes.num_hidden_layers,
        "n_head": sizes.num_attention_heads,
        "n_positions": sizes.max_position_embeddings,
        "vocab_size": sizes.vocab_size,
        "layer_norm_epsilon": sizes.rms_norm_eps,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "attn_pdrop": sizes.attention_dropout,
        "resid_pdrop": sizes.resid_pdrop,
        "embd_pdrop": sizes.resid_pdrop,
        "initializer_range": sizes.initializer_range,
    }
    return config, tuple(refused)
