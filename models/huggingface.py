"""What a Hugging Face checkpoint and `config.json` are to us: the words in which families state their mapping. Pure.

Owns no mapping itself: `models/<family>/huggingface.py` does. A key of a `config.json` that would change the model and
is not implemented is refused with its reason, never ignored; reading tensors is not done here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Refusal = tuple[str, str]
"""A key of `config.json`, and why a model with that value cannot be built."""

# fmt: off
NEUTRAL_KEYS = frozenset(
    {
        "architectures", "_name_or_path", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
        "id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states",
        "tokenizer_class", "chunk_size_feed_forward", "attn_implementation", "_attn_implementation_autoset",
        "task_specific_params", "prefix", "max_length", "name_or_path", "is_encoder_decoder", "transformers.js_config",
    }
)
# fmt: on
"""Keys that say nothing about the computation: identity, token ids, generation, storage type."""

HEAD_WEIGHT = "lm_head.weight"
"""The output head in every family's files; absent or a copy of the embedding where the two are tied."""


@dataclass(frozen=True, slots=True)
class ForeignWeight:
    """Where one of our parameters is found in a Hugging Face state dict."""

    name: str
    """Our logical name (`ParameterSpec.name`)."""
    foreign: str
    """Key in the foreign state dict."""
    transposed: bool = False
    """Whether it is stored as [inputs, outputs] (GPT-2's `Conv1D`) instead of [outputs, inputs]."""
    part: int = 0
    """Which of `parts` equal blocks of output features of the foreign tensor it is."""
    parts: int = 1
    """How many of our parameters the foreign tensor holds (3 for fused query, key, value)."""

    def foreign_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the foreign tensor, given that of our parameter."""
        whole = (self.parts * shape[0], *shape[1:])
        return whole[::-1] if self.transposed else whole


@dataclass(frozen=True, slots=True)
class ImportedSizes:
    """A `config.json` read as ours."""

    sizes: dict[str, Any]
    """Keyword arguments of `ModelConfig`, complete: nothing is left to our own defaults."""
    refused: tuple[Refusal, ...]
    """Everything that stands against it; `sizes` may be used only when this is empty."""


@dataclass(slots=True)
class ConfigReader:
    """Reads keys of one `config.json` and remembers which were read and which were refused."""

    config: Mapping[str, Any]
    refused: list[Refusal] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any) -> Any:
        """The value, or what Hugging Face takes when the key is absent."""
        self.read.add(key)
        return self.config.get(key, default)

    def need(self, key: str) -> Any:
        """The value of a size without which there is no model; its absence is refused."""
        self.read.add(key)
        if self.config.get(key) is None:
            self.refused.append((key, "is missing, and the model's sizes cannot be known without it"))
            return None
        return self.config[key]

    def expect(self, key: str, allowed: Collection[Any], reason: str) -> None:
        """Refuse every present value but the allowed ones."""
        self.read.add(key)
        if key in self.config and self.config[key] not in allowed:
            self.refused.append((key, f"={self.config[key]!r} is not implemented: {reason}"))

    def finish(self, sizes: dict[str, Any]) -> ImportedSizes:
        """Refuse what nobody asked about, and hand over."""
        unknown = sorted(set(self.config) - self.read - NEUTRAL_KEYS)
        refused = [*self.refused, *((key, "is not known here and might change the model") for key in unknown)]
        return ImportedSizes(sizes, tuple(refused))
