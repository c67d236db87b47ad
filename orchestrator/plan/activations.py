"""Bytes of activations: what one block keeps from forward to backward, what its backward works on, and the logits.

Counted tensor by tensor from what each operation saves for its backward pass. With scores stored and half-precision
this is sbh(10 + 24/t + 5as/(ht)) and, with sequence parallelism, sbh/t(34 + 5as/h) of Korthikanti et al. 2022
(arXiv:2205.05198, table 2); for `ours` a test of the engine counts the tensors that the real modules save.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.plan.loss_chunks import chunk_of, gradient_ahead, row_bytes
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.work import Work

_SCORE_BYTES = 5
"""A stored attention score: softmax output 2, dropout mask 1, dropout output 2 (Korthikanti et al. 2022, section
4.1)."""


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Activations of one block and micro-batch on one GPU, in bytes."""

    kept: float
    """From forward to backward, under the chosen recomputation."""
    working: float
    """What backward holds beside that while it is in this block, when that and `weight_gradients` are largest: what it
    recomputed, and gradients of activations."""
    deferred: float = 0.0
    """What waits beside `kept` for the weights' gradients once those of the inputs are there, where the two are apart:
    the gradient of every product's and norm's result."""
    products_inputs: float = 0.0
    """Of `kept`, inputs of products that nothing else needs."""
    weight_gradients: float = 0.0
    """Gradients of weights, as they come, that exist then."""
    working_added: float = 0.0
    """`working` where each weight's gradient is added to a kept one, and gone, before the next is made."""
    weight_added: float = 0.0
    """`weight_gradients` then."""
    handed_on: float = 0.0
    """The gradient of the block's input, which is what its backward leaves."""


def block_activations(work: Work, profile: SystemProfile) -> BlockActivations:
    """Activations of one block and micro-batch."""
    everything = _all_saved(work, profile)
    stream, tables = _stream(work), _cast_tables(work, profile)
    kept = {
        "none": everything,
        "attention": everything - _scores(work, profile),
        "cheap": _products_only(work, profile),
        "operators": _every_second_product(work, profile),
        "layers": (everything + stream) / 2,
        "full": stream,
    }[work.recompute]
    # A block's input is kept and read again: it is one tensor.
    again = everything - stream if work.recompute in ("layers", "full") else everything - kept
    state = profile.bytes_of(work.precision)
    raw = state.raw_gradients if profile.master_gathered else 0.0
    besides, made = zip(*_backward_moments(work, profile), strict=True)
    beside, weights = _largest(besides, accumulate(made), raw)
    # Gradients that are narrower than the kept ones wait for the rest of their unit.
    added = _largest(besides, made, raw) if state.raw_gradients == state.gradients else (beside, weights)
    return BlockActivations(
        kept=kept + tables,
        working=again + beside,
        deferred=_products_gradients(work) + 2.0 * stream,
        products_inputs=_products_inputs(work),
        weight_gradients=weights,
        working_added=again + added[0],
        weight_added=added[1],
        handed_on=stream,
    )


def _largest(besides: Iterable[float], elements: Iterable[float], element_bytes: float) -> tuple[float, float]:
    """(bytes beside weights' gradients, bytes of those) where both are most."""
    return max(zip(besides, (count * element_bytes for count in elements), strict=True), key=sum)


def _cast_tables(work: Work, profile: SystemProfile) -> float:
    """Rotary tables in the compute type: mixed precision casts what every block is given, also the tables."""
    if not (profile.casts_block_inputs and work.architecture.gated and work.precision.endswith("_mixed")):
        return 0.0
    return float(work.sequence_length) * work.architecture.head_dim * work.activation_bytes


def _stream(work: Work) -> float:
    """The residual stream, as a block keeps it."""
    split = work.parallel.tensor if work.sequence_parallel else 1
    return float(work.tokens) * work.architecture.hidden * work.activation_bytes / split


def _scores(work: Work, profile: SystemProfile) -> float:
    """Stored attention scores; none with flash attention."""
    if profile.attention == "flash":
        return 0.0
    return float(work.tokens) * work.seen * work.architecture.heads * _SCORE_BYTES / work.parallel.tensor


def _statistics(work: Work, profile: SystemProfile) -> float:
    """Bytes a token of the softmax's normalisers, FP32, which flash attention keeps for each head."""
    return 4.0 * work.architecture.heads if profile.attention == "flash" else 0.0


def _norm_bytes(work: Work, profile: SystemProfile) -> int:
    """What a norm saves of each feature. LayerNorm has a fused kernel everywhere; RMSNorm, which gated models use, has
    none on a CPU."""
    return work.activation_bytes if profile.fused_norms(work) or not work.architecture.gated else 8


def _all_saved(work: Work, profile: SystemProfile) -> float:
    """Everything that a block's operations save."""
    model, tensor, element = work.architecture, work.parallel.tensor, work.activation_bytes
    tokens = float(work.tokens)
    features = tokens * model.hidden
    cut = tensor if work.sequence_parallel else 1
    norms = 2.0 * _norm_bytes(work, profile) * features / cut
    # Inputs of the first products: saved whole where the gather is not repeated in the backward pass.
    inputs = 2.0 * element * features / (1 if profile.saves_gathered_inputs else cut)
    masks = profile.dropout_masks * features / cut
    query = model.heads * model.head_dim
    key_value = 2.0 * model.key_value_heads * model.head_dim
    attention = tokens * (element * (2.0 * query + key_value) + _statistics(work, profile)) / tensor
    mlp = tokens * element * _inner_tensors(work, profile) * model.ffn / tensor
    return norms + inputs + masks + attention + mlp + _scores(work, profile)


def _products_only(work: Work, profile: SystemProfile) -> float:
    """Kept when only cheap operations are recomputed: the block's input, results of products, and attention's
    output."""
    model, tensor, element = work.architecture, work.parallel.tensor, work.activation_bytes
    query = model.heads * model.head_dim
    key_value = 2.0 * model.key_value_heads * model.head_dim
    inner = (2.0 if model.gated else 1.0) * model.ffn
    cut = work.tokens * (element * (2.0 * query + key_value + inner) + _statistics(work, profile)) / tensor
    return 2.0 * _stream(work) + cut


def _every_second_product(work: Work, profile: SystemProfile) -> float:
    """Kept by torchtitan's per-operation policy: results of the first, third, ... product, and attention's output."""
    model, tensor, element = work.architecture, work.parallel.tensor, work.activation_bytes
    query, key = model.heads * model.head_dim, model.key_value_heads * model.head_dim
    cut = work.tokens * (element * (2.0 * query + key + model.ffn) + _statistics(work, profile)) / tensor
    return 2.0 * _stream(work) + cut


def _backward_moments(work: Work, profile: SystemProfile) -> tuple[tuple[float, float], ...]:
    """(bytes of activations and their gradients beside everything saved, elements of weights whose gradients have been
    made since the moment before) at the moments of a block's backward that can be its largest, in order.

    Autograd takes the feed-forward layer first: its last product, the activation function, the products in front of
    it, then attention. A saved tensor is given back once its operation is done. A product computes its weight's
    gradient before its input's. Stream and products' inputs are one size unless sequence parallelism cuts the stream.
    """
    model, tensor, element = work.architecture, work.parallel.tensor, work.activation_bytes
    whole = float(work.tokens) * model.hidden * element
    stream, inner = _stream(work), float(work.tokens) * model.ffn * element / tensor
    matrix = model.hidden * model.ffn / tensor
    others = model.hidden * model.head_dim * (model.heads + 2.0 * model.key_value_heads) / tensor
    saved = _inner_tensors(work, profile)
    gathered = whole if work.sequence_parallel else 0.0
    last_product = (gathered + inner + stream, matrix)
    if model.gated:
        return (
            last_product,
            (2.0 * inner + stream, 0.0),
            (whole + stream - inner, matrix),
            (2.0 * whole + stream + (1.0 - saved) * inner, matrix),
            (2.0 * whole + stream - saved * inner, others),
        )
    return (
        last_product,
        (inner + stream, 0.0),
        (whole + stream + (1.0 - saved) * inner, matrix),
        (2.0 * whole + stream - saved * inner, others),
    )


def _inner_tensors(work: Work, profile: SystemProfile) -> int:
    """Tensors of the feed-forward layer's inner width that are saved."""
    return (3 if profile.fused_kernels else 4) if work.architecture.gated else 2


def _products_gradients(work: Work) -> float:
    """Gradients of the results of a block's products."""
    model, tensor, element = work.architecture, work.parallel.tensor, work.activation_bytes
    query, key_value = model.heads * model.head_dim, 2.0 * model.key_value_heads * model.head_dim
    cut = (query + key_value + (2.0 if model.gated else 1.0) * model.ffn) / tensor
    return work.tokens * element * (cut + 2.0 * model.hidden)


def _products_inputs(work: Work) -> float:
    """Inputs of products, but for attention's result, which attention keeps as well."""
    model, element = work.architecture, work.activation_bytes
    return float(work.tokens) * element * (2.0 * model.hidden + model.ffn / work.parallel.tensor)


def head_weight_bytes(work: Work, profile: SystemProfile) -> float:
    """The gradient of the head's weight, where it comes with the loss, as it waits for the backward pass."""
    if not profile.loss_in_chunks:
        return 0.0
    return float(_rows(work, profile) * work.architecture.hidden * work.activation_bytes)


def _rows(work: Work, profile: SystemProfile) -> int:
    return -(-work.architecture.vocab // (work.parallel.tensor if profile.logits_cut else 1))


def logits_bytes(work: Work, profile: SystemProfile) -> float:
    """What is as wide as the vocabulary when the loss is largest, cut over the tensor ranks: logits or what the loss
    works on, and, where the loss brings it along, the gradient of the head's weight."""
    rows = _rows(work, profile)
    hidden, element = work.architecture.hidden, work.activation_bytes
    if profile.loss_in_chunks:
        return rows * row_bytes(chunk_of(work.tokens, hidden, element), work.tokens, hidden, element)
    # In the backward pass of the loss: log-probabilities and two gradients. A pipeline keeps the last stage's output,
    # the logits themselves, beside what the loss works on.
    output = element if work.parallel.pipeline > 1 and profile.keeps_stage_outputs else 0
    return float(work.tokens) * rows * (profile.logit_bytes + output)


def head_activations(work: Work, profile: SystemProfile) -> float:
    """What the head holds beside that: input and output of the final norm, the output put together from the parts of
    the sequence, and its gradient."""
    features, norm = float(work.tokens) * work.architecture.hidden, head_waits(work, profile)
    if not profile.loss_in_chunks:
        return norm
    # Where gradients are not computed ahead, all micro-batches wait with their final hidden states.
    waiting = 1 if gradient_ahead(work.parallel.schedule, work.parallel.pipeline) else work.parallel.micro_batches
    return features * work.activation_bytes + norm * waiting


def head_waits(work: Work, profile: SystemProfile) -> float:
    """Of that, what each micro-batch keeps that waits for the loss's gradient: input and output of the final norm."""
    features, element = float(work.tokens) * work.architecture.hidden, work.activation_bytes
    norm = (_norm_bytes(work, profile) + element) * features
    if profile.loss_in_chunks and work.sequence_parallel:
        return norm / work.parallel.tensor + features * element
    return norm


def kept_of_head(work: Work, profile: SystemProfile) -> float:
    """Of that, what a micro-batch keeps until its backward pass where that comes later: the norm's input and, where the
    loss brings it along, the gradient of its result."""
    features, element = float(work.tokens) * work.architecture.hidden, work.activation_bytes
    cut = work.parallel.tensor if work.sequence_parallel else 1
    return _norm_bytes(work, profile) * features / cut + (features * element if profile.loss_in_chunks else 0.0)


def table_bytes(work: Work, profile: SystemProfile) -> float:
    """Rotary tables of one stage, cosines and sines of every position."""
    if not (profile.casts_block_inputs and work.architecture.gated):
        return 0.0
    return float(work.sequence_length) * work.architecture.head_dim * (2 if work.precision == "bf16_pure" else 4)
