"""Hugging Face's names and `config.json` against ours: what is read, what is refused, what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from models.huggingface import ImportedSizes
from models.registry import FAMILIES, family
from models.spec import parameter_count, parameter_specs
from orchestrator.config.schema.model import ModelConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
LLAMA = {"model_type": "llama", **SIZES}
MISTRAL = {"model_type": "mistral", **SIZES}
QWEN2 = {"model_type": "qwen2", **SIZES}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 50}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(config: dict[str, Any]) -> ImportedSizes:
    name = next(name for name, one in FAMILIES.items() if config.get("model_type", "llama") in one.model_types)
    return family(name).sizes_from_config(config)


def accepted(config: dict[str, Any]) -> ModelConfig:
    result = read(config)
    assert result.refused == ()
    return ModelConfig(**result.sizes)


def test_absent_keys_take_what_hugging_face_takes_not_our_defaults() -> None:
    model = accepted(LLAMA)
    assert model.rms_norm_eps == 1e-6
    assert model.max_position_embeddings == 2048
    assert model.rope_theta == 10000.0
    assert model.num_key_value_heads is None
    assert accepted(MISTRAL).num_key_value_heads == 8
    assert accepted(MISTRAL).sliding_window == 4096


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_both_spellings_of_rotary_scaling_are_read(rope: dict[str, Any]) -> None:
    model = accepted(LLAMA | rope)
    assert model.rope_theta == 5e5
    assert model.rope_scaling is not None
    assert model.rope_scaling.model_dump() == {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize("rope", [{"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}])
def test_linear_scaling_is_read_under_its_old_and_new_key(rope: dict[str, Any]) -> None:
    scaling = accepted(LLAMA | {"rope_scaling": rope}).rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor) == ("linear", 2.0)


def test_qwen2_has_query_key_value_biases_and_no_output_bias() -> None:
    model = accepted(QWEN2)
    assert (model.attention_bias, model.attention_output_bias) == (True, False)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 16}, 16),
        (QWEN2 | {"sliding_window": 16}, None),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True}, None),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 16),
        (QWEN2 | {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_a_window_is_taken_only_where_every_layer_has_it(config: dict[str, Any], window: int | None) -> None:
    assert accepted(config).sliding_window == window


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA | {"model_type": "gemma"}, "model_type"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA | {"pretraining_tp": 2}, "pretraining_tp"),
        (LLAMA | {"sliding_window": 16}, "sliding_window"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling"),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters"),
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        (QWEN2 | {"attention_bias": False}, "attention_bias"),
        (QWEN2 | {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers"),
        (GPT2 | {"activation_function": "relu"}, "activation_function"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"embd_pdrop": 0.2}, "embd_pdrop"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size"),
        ({key: value for key, value in GPT2.items() if key != "n_head"}, "n_head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_refused_by_its_key(config: dict[str, Any], key: str) -> None:
    result = family("gpt" if "n_embd" in config else "llama").sizes_from_config(config)
    assert [refused for refused, _ in result.refused] == [key]
    assert all(reason for _, reason in result.refused)


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
            "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
            "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {}},
            "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
        },
        134_515_008,
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
            "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        494_032_768,
    ),
    "gpt2": (
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True}},
            "vocab_size": 50257,
        },
        124_439_808,
    ),
}  # fmt: skip
"""A file as it is published, and the parameters that its model has."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_as_they_are(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert parameter_count(accepted(config)) == parameters


def test_all_refusals_come_at_once() -> None:
    result = read(LLAMA | {"hidden_act": "relu", "mlp_bias": True, "unheard_of": 1})
    assert [key for key, _ in result.refused] == ["hidden_act", "mlp_bias", "unheard_of"]


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 2, "attention_bias": True, "head_dim": 32},
        LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        MISTRAL,
        QWEN2,
        QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
        GPT2,
        GPT2 | {"tie_word_embeddings": False, "n_inner": 100, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    ],
    ids=[
        "llama",
        "tied grouped biased",
        "llama3 rope",
        "linear rope",
        "mistral",
        "qwen2",
        "qwen2 window",
        "gpt2",
        "gpt2 own",
    ],
)
def test_a_config_written_by_us_reads_back_as_the_same_model(config: dict[str, Any]) -> None:
    model = accepted(config)
    written, refused = family(model.family).config_from_sizes(model)
    assert refused == ()
    assert written["model_type"] == config["model_type"]
    again = accepted(written)
    assert parameter_specs(again) == parameter_specs(model)
    for key in ("rope_theta", "rope_scaling", "sliding_window", "rms_norm_eps", "attention_dropout", "resid_pdrop"):
        assert getattr(again, key) == getattr(model, key), key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"attention_bias": False, "attention_output_bias": True}, "attention_output_bias"),
        ({"attention_bias": True, "sliding_window": 8}, "attention_output_bias"),
        ({"resid_pdrop": 0.1}, "resid_pdrop"),
        ({"family": "gpt", "head_dim": 8}, "head_dim"),
    ],
)
def test_sizes_that_no_published_class_has_are_not_exported(changes: dict[str, Any], key: str) -> None:
    model = ModelConfig(**(SIZES | {"max_position_embeddings": 64} | changes))
    _, refused = family(model.family).config_from_sizes(model)
    assert [name for name, _ in refused] == [key]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_with_values_of_its_own_has_one_place_in_a_foreign_file(name: str, tied: bool) -> None:
    model = ModelConfig(family=name, **SIZES, max_position_embeddings=64, tie_word_embeddings=tied)
    weights = family(name).foreign_weights(model)
    assert [one.name for one in weights] == [one.name for one in parameter_specs(model) if one.tied_to is None]
    places = [(one.foreign, one.part) for one in weights]
    assert len(set(places)) == len(places)
