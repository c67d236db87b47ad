"""Bytes of activations: what one block keeps from forward to backward, what its backward works on, and the logits.

Counted tensor by tensor from what each operation saves for its backward pass. With scores stored and half-precision
this is sbh(10 + 24/t + 5as/(ht)) and, with sequence parallelism, sbh/t(34 + 5as/h) of Korthikanti et al. 2022
(arXiv:2205.05198, table 2); for `ours` a test of the engine counts the tensors that the real modules save.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.plan.loss_chunks import chunk_of, gradient_ahead, row_bytes, waiting_weight_gradients
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
    """What backward holds beside that while it is in this block: what it recomputed, and gradients of activations."""
    deferred: float = 0.0
    """What waits beside `kept` for the weights' gradients once those of the inputs are there, where the two are apart:
    the gradient of every product's result."""


def block_activations(work: Work, profile: SystemProfile) -> BlockActivations:
    """Activations of one block and micro-batch."""
    everything = _all_saved(work, profile)
    stream = _stream(work)
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
    return BlockActivations(kept, again + _gradients(work, profile), _products_gradients(work))


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
    hidden_tensors = (3 if profile.fused_kernels else 4) if model.gated else 2
    mlp = tokens * element * hidden_tensors * model.ffn / tensor
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


def _gradients(work: Work, profile: SystemProfile) -> float:
    """Gradients of activations that exist at once in a block's backward, less what has been given back by then.

    Most are in the feed-forward layer: those of gate and up, or of up alone, beside that of their product, whose own
    value is no longer needed; and that of the stream, whole in front of the row-wise product and cut elsewhere."""
    model, tensor, element = work.architecture, work.parallel.tensor, work.activation_bytes
    inner = (2.0 if model.gated else 1.0) * model.ffn / tensor
    streams = 1.0 + 1.0 / tensor if work.sequence_parallel else 1.0
    return work.tokens * element * (inner + streams * model.hidden)


def _products_gradients(work: Work) -> float:
    """Gradients of the results of a block's products."""
    model, tensor, element = work.architecture, work.parallel.tensor, work.activation_bytes
    query, key_value = model.heads * model.head_dim, 2.0 * model.key_value_heads * model.head_dim
    cut = (query + key_value + (2.0 if model.gated else 1.0) * model.ffn) / tensor
    return work.tokens * element * (cut + 2.0 * model.hidden)


def logits_bytes(work: Work, profile: SystemProfile) -> float:
    """The head of one micro-batch at its largest: logits or what the loss works on, cut over the tensor ranks, and what
    the final norm saved."""
    rows = -(-work.architecture.vocab // (work.parallel.tensor if profile.logits_cut else 1))
    hidden, element = work.architecture.hidden, work.activation_bytes
    norm = float(work.tokens) * (_norm_bytes(work, profile) + element) * hidden
    if profile.loss_in_chunks:
        # Where gradients are not computed ahead, all micro-batches wait with their final hidden states.
        waiting = 1 if gradient_ahead(work.parallel.schedule, work.parallel.pipeline) else work.parallel.micro_batches
        chunk = chunk_of(work.tokens, hidden, element)
        gradient = float(work.tokens) * hidden * element
        put_off = waiting_weight_gradients(work.parallel.schedule, work.parallel.pipeline) * rows * hidden * element
        return rows * row_bytes(chunk, work.tokens, hidden, element) + gradient + put_off + norm * waiting
    # In the backward pass of the loss: log-probabilities and two gradients. A pipeline keeps the last stage's output,
    # the logits themselves, beside what the loss works on.
    output = element if work.parallel.pipeline > 1 and profile.keeps_stage_outputs else 0
    return float(work.tokens) * rows * (profile.logit_bytes + output) + norm
