"""What a model consists of, as values: its sizes, its parameters, and how an engine may cut it.

Owns the vocabulary that families (`models/llama/parameters.py`) write in and planner and engine read. Knows no degree,
rank, group or dtype, and imports neither torch nor anything of `orchestrator`. Counts and the front door are in
`models/spec.py`, the list of families in `models/registry.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

Part = Literal["embedding", "block", "head"]
"""Where a parameter lives along the pipeline: before the blocks, in one of them, after them (final norm included)."""

Style = Literal[
    "vocabulary_embedding",
    "scatter_output",
    "norm",
    "gather_input",
    "colwise",
    "rowwise",
    "vocabulary_head",
    "stream_dropout",
    "head_dropout",
]
"""How tensor parallelism treats a module. With sequence parallelism the residual stream is cut along the sequence.

`vocabulary_embedding`  rows of the table are cut; outputs are summed (all-reduce, or reduce-scatter along the sequence)
`scatter_output`        parameters replicated, computed from the whole sequence; the output is cut along the sequence
`norm`                  parameters replicated, each rank normalises its own part of the sequence
`gather_input`          no parameters of its own; its input is put together from the parts of the sequence
`colwise`               output features (rows of the weight, and the bias) are cut; input whole, output cut
`rowwise`               input features (columns of the weight) are cut; outputs are summed as above; bias replicated
`vocabulary_head`       as colwise; input put together from the parts of the sequence; logits cut along the vocabulary
`stream_dropout`        no parameters; drops elements of the residual stream, alike where all ranks hold it alike
`head_dropout`          no parameters; drops inside of attention heads, of which each rank has its own

Without sequence parallelism `scatter_output` and `gather_input` do nothing to values and sums are all-reduces; the
parameters of `norm` and `scatter_output` are replicated all the same.
"""


class RopeScaling(Protocol):
    """Stretching of rotary frequencies, in the names of Hugging Face's `rope_scaling`."""

    @property
    def rope_type(self) -> Literal["linear", "llama3"]: ...  # noqa: D102
    @property
    def factor(self) -> float: ...  # noqa: D102
    @property
    def low_freq_factor(self) -> float: ...  # noqa: D102
    @property
    def high_freq_factor(self) -> float: ...  # noqa: D102
    @property
    def original_max_position_embeddings(self) -> int: ...  # noqa: D102


class ModelSizes(Protocol):
    """Sizes of a transformer, in the names of Hugging Face's `config.json`; any object with these attributes fits."""

    @property
    def family(self) -> str: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int | None: ...  # noqa: D102
    @property
    def head_dim(self) -> int | None: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def rope_theta(self) -> float: ...  # noqa: D102
    @property
    def rope_scaling(self) -> RopeScaling | None: ...  # noqa: D102
    @property
    def sliding_window(self) -> int | None: ...  # noqa: D102
    @property
    def rms_norm_eps(self) -> float: ...  # noqa: D102
    @property
    def tie_word_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def attention_bias(self) -> bool | None: ...  # noqa: D102
    @property
    def attention_output_bias(self) -> bool | None: ...  # noqa: D102
    @property
    def attention_dropout(self) -> float: ...  # noqa: D102
    @property
    def resid_pdrop(self) -> float: ...  # noqa: D102
    @property
    def initializer_range(self) -> float: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Init:
    """Initial values of one parameter, before any rank or seed is known."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0
    """Standard deviation of `normal` (mean 0); 0 for the others."""


ONES = Init("ones")
ZEROS = Init("zeros")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One logical parameter, whole: as one process would hold it."""

    name: str
    """Dotted name, the same as the module's `state_dict` key under every plan (`layers.3.attention.q_proj.weight`)."""
    shape: tuple[int, ...]
    layer: int | None
    """Global index of the block it belongs to; None outside the blocks."""
    part: Part
    matmul: bool
    """Whether each token is multiplied with it as a matrix (linear weights and the head, not the embedding look-up)."""
    decay: bool
    """Whether weight decay applies: matrices yes; norms and biases (one dimension) no."""
    init: Init
    tensor_dim: int | None
    """Dimension that tensor parallelism cuts; None: every tensor rank holds all of it."""
    tied_to: str | None = None
    """Name of the parameter whose values this one shares; None: it has values of its own."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter (tied ones are not discounted)."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardingTable:
    """How a model may be cut, as data; `*` in a pattern stands for one dotted component (a layer's index).

    The names are those of modules (`named_modules`), not of parameters. Modules that a pipeline stage does not hold
    are simply absent there.
    """

    styles: tuple[tuple[str, Style], ...]
    """Module pattern -> tensor-parallel style; each module with parameters matches exactly one."""
    units: tuple[tuple[str, ...], ...]
    """Groups of module patterns that are gathered and reduced together (ZeRO, FSDP), in forward order."""
    embedding: tuple[str, ...]
    """Modules that only the first pipeline stage holds."""
    layers: str
    """Container of the blocks, keyed by global index; any cut between two blocks is a legal pipeline cut."""
    head: tuple[str, ...]
    """Modules that only the last pipeline stage holds."""


@dataclass(frozen=True, slots=True)
class SizeProblem:
    """Sizes that a family cannot build; `key` is a field of the sizes, without prefix."""

    key: str
    message: str
    fix: str


def head_features(sizes: ModelSizes) -> int:
    """Features of one attention head: `head_dim`, or hidden_size / num_attention_heads (exact only if it divides)."""
    return sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads


def key_value_heads(sizes: ModelSizes) -> int:
    """Heads of keys and values: `num_key_value_heads`, or as many as query heads."""
    return sizes.num_key_value_heads or sizes.num_attention_heads


def attention_biases(sizes: ModelSizes, default: bool) -> tuple[bool, bool]:
    """Whether (query/key/value, output) projections have biases; `default` is what the family does when null."""
    inner = default if sizes.attention_bias is None else sizes.attention_bias
    outer = inner if sizes.attention_output_bias is None else sizes.attention_output_bias
    return inner, outer


def residual_std(sizes: ModelSizes) -> float:
    """Standard deviation of the projections that write into the residual stream.

    initializer_range / sqrt(2 x layers): each block adds two such branches, so the stream's variance at the end does
    not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    """
    return sizes.initializer_range / math.sqrt(2 * sizes.num_hidden_layers)


def linear_specs(
    name: str,
    outputs: int,
    inputs: int,
    *,
    layer: int,
    bias: bool,
    cut: Literal["outputs", "inputs"],
    std: float,
) -> tuple[ParameterSpec, ...]:
    """Parameters of one linear layer inside a block: weight [outputs, inputs] and, if asked for, bias [outputs]."""
    dim = 0 if cut == "outputs" else 1
    weight = ParameterSpec(f"{name}.weight", (outputs, inputs), layer, "block", True, True, Init("normal", std), dim)
    if not bias:
        return (weight,)
    bias_dim = 0 if cut == "outputs" else None
    return weight, ParameterSpec(f"{name}.bias", (outputs,), layer, "block", False, False, ZEROS, bias_dim)


def norm_specs(name: str, features: int, *, layer: int | None, part: Part, bias: bool) -> tuple[ParameterSpec, ...]:
    """Parameters of one normalisation: weight [features] and, for LayerNorm, bias [features]; replicated."""
    weight = ParameterSpec(f"{name}.weight", (features,), layer, part, False, False, ONES, None)
    if not bias:
        return (weight,)
    return weight, ParameterSpec(f"{name}.bias", (features,), layer, part, False, False, ZEROS, None)


def vocabulary_specs(sizes: ModelSizes) -> tuple[ParameterSpec, ParameterSpec]:
    """The embedding table and the output head, both [vocab_size, hidden_size], cut along the vocabulary."""
    shape = (sizes.vocab_size, sizes.hidden_size)
    init = Init("normal", sizes.initializer_range)
    tied_to = "embedding.weight" if sizes.tie_word_embeddings else None
    return (
        ParameterSpec("embedding.weight", shape, None, "embedding", False, True, init, 0),
        ParameterSpec("head.weight", shape, None, "head", True, True, init, 0, tied_to),
    )


def attention_specs(sizes: ModelSizes, layer: int, *, default_bias: bool) -> tuple[ParameterSpec, ...]:
    """Projections of one attention: query, key, value by heads (`colwise`), output (`rowwise`)."""
    width = head_features(sizes)
    heads, shared = sizes.num_attention_heads * width, key_value_heads(sizes) * width
    hidden, std = sizes.hidden_size, sizes.initializer_range
    inner, outer = attention_biases(sizes, default_bias)
    name = f"layers.{layer}.attention"
    return (
        *linear_specs(f"{name}.q_proj", heads, hidden, layer=layer, bias=inner, cut="outputs", std=std),
        *linear_specs(f"{name}.k_proj", shared, hidden, layer=layer, bias=inner, cut="outputs", std=std),
        *linear_specs(f"{name}.v_proj", shared, hidden, layer=layer, bias=inner, cut="outputs", std=std),
        *linear_specs(f"{name}.o_proj", hidden, heads, layer=layer, bias=outer, cut="inputs", std=residual_std(sizes)),
    )


def unit_groups(embedding: tuple[str, ...], head: tuple[str, ...], tied: bool) -> tuple[tuple[str, ...], ...]:
    """Sharding units of a decoder: one a block; embedding and head apart, or together when they share the weight."""
    if tied:
        return (*((*embedding, *head),), ("layers.*",))
    return (embedding, ("layers.*",), head)


def head_size_problems(sizes: ModelSizes) -> tuple[SizeProblem, ...]:
    """Problems of the attention's sizes that every family shares."""
    problems: list[SizeProblem] = []
    heads, shared = sizes.num_attention_heads, key_value_heads(sizes)
    if sizes.head_dim is None and sizes.hidden_size % heads:
        problems.append(
            SizeProblem(
                "num_attention_heads",
                f"hidden_size={sizes.hidden_size} cannot be split evenly over num_attention_heads={heads}.",
                f"Use a divisor of {sizes.hidden_size}, or set head_dim.",
            )
        )
    if heads % shared:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        problems.append(
            SizeProblem(
                "num_key_value_heads",
                f"num_key_value_heads={shared} does not divide num_attention_heads={heads}: "
                "each key and value head serves the same number of query heads.",
                f"Use one of {divisors}.",
            )
        )
    return tuple(problems)
