"""The `llama` family in Hugging Face's words (LLaMA, Mistral, Qwen2): names and `config.json`, both ways; pure.

Refuses each value that `module.py` does not compute. The words (`ForeignWeight`, `ImportedSizes`) are in
`models/huggingface.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.huggingface import ConfigReader, ForeignWeight, ImportedSizes, Refusal
from models.llama.parameters import DEFAULT_ATTENTION_BIAS, parameter_specs
from models.parameters import ModelSizes, attention_biases, head_features, key_value_heads

IGNORED_WEIGHTS = ("*.rotary_emb.inv_freq",)
"""Patterns of foreign tensors that are no parameters: old checkpoints keep the rotary frequencies."""

PREFIX = "model."
"""Beginning of every name but the head's; files written by the bare model lack it."""

OUTSIDE_BLOCKS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INSIDE_BLOCKS = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}

ROPE_TYPES = ("default", "linear", "llama3")
CONTEXT_DEFAULTS = {"llama": 2048, "mistral": 131072, "qwen2": 32768}
"""`max_position_embeddings` that transformers assumes when a config.json has none, by model_type."""
KEY_VALUE_DEFAULTS = {"mistral": 8, "qwen2": 32}
"""`num_key_value_heads` that transformers assumes when a config.json has none; LLaMA: as many as query heads."""


def foreign_weights(sizes: ModelSizes) -> tuple[ForeignWeight, ...]:
    """One entry a parameter with values of its own (a tied head has none and is absent in the foreign file)."""
    return tuple(
        ForeignWeight(spec.name, foreign_name(spec.name)) for spec in parameter_specs(sizes) if spec.tied_to is None
    )


def foreign_name(name: str) -> str:
    """Hugging Face's name of our parameter."""
    if name in OUTSIDE_BLOCKS:
        return OUTSIDE_BLOCKS[name]
    layers, index, module, rest = name.split(".", 3)
    return f"model.{layers}.{index}.{INSIDE_BLOCKS[module]}.{rest}"


def sizes_from_config(config: Mapping[str, Any]) -> ImportedSizes:
    """Read a `config.json` of model_type llama, mistral or qwen2 (files of transformers 4 and 5 alike)."""
    reader = ConfigReader(config)
    kind = config.get("model_type")
    reader.expect("model_type", tuple(CONTEXT_DEFAULTS), "family llama reads llama, mistral and qwen2")
    reader.expect("hidden_act", ("silu", "swish"), "the feed-forward layer is SwiGLU")
    reader.expect("mlp_bias", (False, None), "the feed-forward layer has no biases")
    reader.expect("pretraining_tp", (1, None), "products are not cut as during that pretraining")
    reader.expect("is_llama_config", (True, None), "the file's own author says that it is no LLaMA")
    reader.expect("use_mrope", (False, None), "rotary positions have one axis")
    reader.expect("rope_interleaved", (False, None), "rotary positions turn feature i with feature i + head_dim / 2")
    reader.expect("quantization_config", (None,), "weights are not quantised")
    reader.expect("auto_map", (None,), "code that comes with a checkpoint is not run")
    layers = reader.need("num_hidden_layers")
    theta, scaling = _rope(reader)
    inner, outer = _biases(reader, kind)
    sizes = {
        "family": "llama",
        "hidden_size": reader.need("hidden_size"),
        "intermediate_size": reader.need("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": reader.need("num_attention_heads"),
        "num_key_value_heads": reader.take("num_key_value_heads", KEY_VALUE_DEFAULTS.get(str(kind))),
        "head_dim": reader.take("head_dim", None),
        "vocab_size": reader.need("vocab_size"),
        "max_position_embeddings": reader.take("max_position_embeddings", CONTEXT_DEFAULTS.get(str(kind), 2048)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": _window(reader, kind),
        "rms_norm_eps": reader.take("rms_norm_eps", 1e-6),
        "tie_word_embeddings": reader.take("tie_word_embeddings", False),
        "attention_bias": inner,
        "attention_output_bias": outer,
        "attention_dropout": reader.take("attention_dropout", 0.0) or 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": reader.take("initializer_range", 0.02),
    }
    return reader.finish(sizes)


def _rope(reader: ConfigReader) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; transformers 5 keeps both in `rope_parameters`, older files apart."""
    nested = dict(reader.take("rope_parameters", None) or {})
    old = dict(reader.take("rope_scaling", None) or {})
    key = "rope_parameters" if nested else "rope_scaling"
    found = nested or old
    theta = found.pop("rope_theta", None) or reader.take("rope_theta", 10000.0)
    reader.read.add("rope_theta")
    kind = found.pop("rope_type", None) or found.get("type", "default")
    found.pop("type", None)
    if kind not in ROPE_TYPES:
        reader.refused.append((key, f"of rope_type {kind!r} is not implemented: there are {', '.join(ROPE_TYPES)}"))
        return theta, None
    known = {
        "default": {"factor"},
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    }[kind]
    if kind == "linear":
        found.pop("original_max_position_embeddings", None)  # written by transformers, without effect for this type
    unknown = sorted(set(found) - known)
    if unknown:
        reader.refused.append((key, f"has keys that are not implemented for rope_type {kind!r}: {', '.join(unknown)}"))
    missing = sorted(known - set(found)) if kind != "default" else []
    if missing:
        reader.refused.append((key, f"of rope_type {kind!r} lacks {', '.join(missing)}"))
    return theta, None if kind == "default" else {"rope_type": kind, **{name: found.get(name) for name in known}}


def _biases(reader: ConfigReader, kind: Any) -> tuple[bool, bool]:
    """Biases of (query/key/value, output); Qwen2's code has the first and no key for it."""
    if kind == "qwen2":
        reader.expect("attention_bias", (True, None), "Qwen2 has query, key and value biases")
        return True, False
    if kind == "mistral":
        reader.expect("attention_bias", (False, None), "Mistral has no biases")
        return False, False
    bias = bool(reader.take("attention_bias", DEFAULT_ATTENTION_BIAS))
    return bias, bias


def _window(reader: ConfigReader, kind: Any) -> int | None:
    """The sliding window that every layer has, or None."""
    window = reader.take("sliding_window", 4096 if kind in ("mistral", "qwen2") else None)
    used = bool(reader.take("use_sliding_window", kind == "mistral"))
    types = reader.take("layer_types", None)
    first = reader.take("max_window_layers", 28 if kind == "qwen2" else 0)
    if kind == "llama":
        if window is not None:
            reader.refused.append(("sliding_window", f"={window} has no effect in Hugging Face's llama; use mistral"))
        return None
    if types:
        if len(set(types)) > 1 or set(types) - {"full_attention", "sliding_attention"}:
            reader.refused.append(("layer_types", "differ between layers, and every block here is alike"))
        return window if "sliding_attention" in types else None
    if not used:
        return None
    # Qwen2 without layer_types: layers from max_window_layers on have the window, those before it have not.
    if 0 < first < (reader.config.get("num_hidden_layers") or 0):
        reader.refused.append(("max_window_layers", f"={first} gives only some layers a window"))
    return None if first else window


def config_from_sizes(sizes: ModelSizes) -> tuple[dict[str, Any], tuple[Refusal, ...]]:
    """The `config.json` of these sizes, and what Hugging Face's classes cannot express of them."""
    inner, outer = attention_biases(sizes, DEFAULT_ATTENTION_BIAS)
    refused: list[Refusal] = []
    kind, name = "llama", "LlamaForCausalLM"
    if inner and not outer:
        kind, name = "qwen2", "Qwen2ForCausalLM"
    elif sizes.sliding_window is not None:
        kind, name = "mistral", "MistralForCausalLM"
    if outer and (not inner or kind != "llama"):
        refused.append(("attention_output_bias", "with these other keys exists in none of LLaMA, Mistral and Qwen2"))
    if sizes.resid_pdrop:
        refused.append(("resid_pdrop", "does not exist in LLaMA, Mistral and Qwen2"))
    rope: dict[str, Any] = {"rope_type": "default"}
    if sizes.rope_scaling is not None:
        names = ["rope_type", "factor"]
        if sizes.rope_scaling.rope_type == "llama3":
            names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
        rope = {key: getattr(sizes.rope_scaling, key) for key in names}
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": key_value_heads(sizes),
        "head_dim": head_features(sizes),
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        # Both spellings: transformers 5 reads rope_parameters, older releases the two others.
        "rope_parameters": {"rope_theta": sizes.rope_theta, **rope},
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None if sizes.rope_scaling is None else rope,
        "rms_norm_eps": sizes.rms_norm_eps,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "attention_dropout": sizes.attention_dropout,
        "initializer_range": sizes.initializer_range,
    }
    if kind == "llama":
        config |= {"attention_bias": inner, "mlp_bias": False}
    if kind == "mistral":
        config["sliding_window"] = sizes.sliding_window
    if kind == "qwen2":
        windowed = sizes.sliding_window is not None
        config |= {"use_sliding_window": windowed, "sliding_window": sizes.sliding_window, "max_window_layers": 0}
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention"] * sizes.num_hidden_layers
    return config, tuple(refused)
