"""`Architecture`: a transformer as the planner sees it: three parts, each a few weights with a shape and a cut.

Sums over parts are exact in elements, uneven cuts included, and cached by degree, so that a search over thousands of
plans never walks the parameters again. Refuses nothing: `plan/validation.py` has judged the sizes before. Sharding is
that of FSDP2 and DTensor: a dimension is cut into ceil-sized chunks, so the first rank holds the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from models.registry import family
from models.spec import ModelSizes, ParameterSpec


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter: its shape, the dimension that tensor parallelism cuts, whether matrix products use it."""

    shape: tuple[int, ...]
    tensor_dim: int | None = None
    matmul: bool = False

    def elements(self, tensor: int = 1, shards: int = 1) -> int:
        """Elements on the rank that holds the most, cut over `tensor` ranks and then by rows over `shards` ranks."""
        shape = list(self.shape)
        if tensor > 1 and self.tensor_dim is not None:
            shape[self.tensor_dim] = -(-shape[self.tensor_dim] // tensor)
        shape[0] = -(-shape[0] // shards)
        return prod(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """Sizes of a decoder-only transformer and the weights of its parts.

    Compared by identity, which makes it a cheap key of the caches; `architecture_of` gives the same one for the same
    sizes.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    ffn: int
    gated: bool
    """Whether the feed-forward layer has a gate (three matrices instead of two)."""
    vocab: int
    tied: bool
    """Whether the output head is the embedding matrix."""
    embedding: tuple[Weight, ...]
    block: tuple[Weight, ...]
    head: tuple[Weight, ...]
    """Final norm and output matrix; the matrix is listed even where it is tied."""

    @property
    def head_owned(self) -> tuple[Weight, ...]:
        """Head weights that the model does not already have in its embedding."""
        return tuple(weight for weight in self.head if not (self.tied and weight.matmul))

    @property
    def parameters(self) -> int:
        """Parameters of the model, a tied matrix once."""
        whole = part_elements(self.embedding) + part_elements(self.head_owned)
        return whole + self.layers * part_elements(self.block)

    @property
    def matmul_parameters(self) -> int:
        """Parameters that take part in matrix products, the output head included, the embedding look-up not."""
        in_blocks = sum(prod(weight.shape) for weight in self.block if weight.matmul)
        return self.layers * in_blocks + self.vocab * self.hidden

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs of one token: 6 x matmul parameters + 12 x layers x hidden x sequence (PaLM, appendix B)."""
        width = self.heads * self.head_dim
        return 6.0 * self.matmul_parameters + 12.0 * self.layers * width * sequence_length


@lru_cache(maxsize=4096)
def part_elements(weights: tuple[Weight, ...], tensor: int = 1, shards: int = 1) -> int:
    """Elements of `weights` on the rank that holds the most, each weight cut for itself."""
    return sum(weight.elements(tensor, shards) for weight in weights)


@lru_cache(maxsize=65536)
def stage_elements(
    architecture: Architecture, layers: int, first: bool, last: bool, tensor: int = 1, shards: int = 1
) -> int:
    """Elements of `layers` blocks, with the embedding if `first` and the head if `last`, on the fullest rank."""
    total = layers * part_elements(architecture.block, tensor, shards)
    if first:
        total += part_elements(architecture.embedding, tensor, shards)
    if last:
        total += part_elements(architecture.head_owned if first else architecture.head, tensor, shards)
    return total


def _weights(specs: tuple[ParameterSpec, ...], part: str, layer: int | None) -> tuple[Weight, ...]:
    return tuple(
        Weight(spec.shape, spec.tensor_dim, spec.matmul) for spec in specs if spec.part == part and spec.layer == layer
    )


def architecture_of(sizes: ModelSizes) -> Architecture:
    """The architecture of a configured model, from the parameter specifications of its family."""
    hashable: Any = sizes  # a frozen section of the configuration
    return _architecture(hashable)


@lru_cache(maxsize=64)
def _architecture(sizes: Any) -> Architecture:
    specs = family(sizes.family).parameter_specs(sizes)
    head_dim = sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads
    return Architecture(
        layers=sizes.num_hidden_layers,
        hidden=sizes.hidden_size,
        heads=sizes.num_attention_heads,
        key_value_heads=sizes.num_key_value_heads or sizes.num_attention_heads,
        head_dim=head_dim,
        ffn=sizes.intermediate_size,
        gated=sizes.family == "llama",
        vocab=sizes.vocab_size,
        tied=sizes.tie_word_embeddings,
        embedding=_weights(specs, "embedding", None),
        block=_weights(specs, "block", 0),
        head=_weights(specs, "head", None),
    )
