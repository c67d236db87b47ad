"""Output head and next-token loss in one: a sum over valid tokens in FP32 that never holds all logits.

The tokens of a micro-batch are taken in chunks: logits, cross-entropy and the logits' gradient of one chunk exist at a
time, in one buffer. With tensor parallelism each rank has the logits of its own part of the vocabulary, and two numbers
a token are exchanged. A mean is never taken here: micro-batches and ranks may hold different numbers of valid tokens,
and a mean of means weighs them wrongly. How many tokens a chunk has is the plan's decision (`plan/loss_chunks.py`); who
calls this with which weight is `head.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

IGNORED = -100
"""Label of a position that is not learned from."""


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Which rows of the vocabulary a rank's part of the head's weight holds, and how the loss is computed from them."""

    first: int
    """Token id of the part's first row."""
    rows: int
    """Rows that are tokens; further ones are padding, whose logits count as -inf."""
    group: dist.ProcessGroup | None
    """The ranks that hold the other parts; None: this one holds all of it."""
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    gradient_ahead: bool
    """Whether gradients are computed beside the loss: three products instead of four, and no logits kept. Otherwise the
    backward pass computes the logits again, which keeps least while several micro-batches wait for theirs."""


def valid_tokens(labels: Tensor) -> int:
    """Positions that are learned from (labels on the host)."""
    return int((labels != IGNORED).sum())


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, share: float, part: HeadPart) -> Tensor:
    """`share` times the sum of the cross-entropies (nats) of the positions whose label is not `IGNORED`.

    hidden [batch, sequence, features] and weight [rows, features] of the same floating type; labels [batch, sequence]
    int64, ids of the whole vocabulary; returns an FP32 scalar (FP64 for FP64), the same on all ranks of the group. The
    gradient of `hidden` is this part's alone: whoever gave it to several parts sums it.
    """
    flat, targets = hidden.flatten(0, 1), labels.flatten()
    if not torch.is_grad_enabled():
        return _summed(flat, weight, targets, part) * share
    loss: Tensor = _HeadLoss.apply(flat, weight, targets, share, part)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, share: float, part: HeadPart) -> Tensor:
        ctx.share, ctx.part, ctx.scaled = share, part, False
        if part.gradient_ahead:
            loss, *gradients = _with_gradients(hidden, weight, labels, share, part)
            ctx.save_for_backward(*gradients)
        else:
            loss = _summed(hidden, weight, labels, part) * share
            ctx.save_for_backward(hidden, weight, labels)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.part.gradient_ahead:
            of_hidden, of_weight = ctx.saved_tensors
            if not ctx.scaled:
                # Ours alone, so scaled in place; once, although a split backward pass comes here for each of the two.
                with _unsafe_preserve_version_counter((of_hidden, of_weight)):
                    of_hidden.mul_(gradient)
                    of_weight.mul_(gradient)
                ctx.scaled = True
        else:
            hidden, weight, labels = ctx.saved_tensors
            _, of_hidden, of_weight = _with_gradients(hidden, weight, labels, ctx.share * gradient, ctx.part)
        return of_hidden, of_weight, None, None, None


def _summed(hidden: Tensor, weight: Tensor, labels: Tensor, part: HeadPart) -> Tensor:
    """The sum of the losses, chunk by chunk."""
    return torch.stack([
        _Chunk(rows, weight, targets, part).loss
        for rows, targets in zip(_pieces(hidden, part), _pieces(labels, part), strict=True)
    ]).sum()  # fmt: skip


def _pieces(tensor: Tensor, part: HeadPart) -> tuple[Tensor, ...]:
    """Rows of one chunk each."""
    pieces: tuple[Tensor, ...] = tensor.split(part.chunk_tokens)  # type: ignore[no-untyped-call]
    return pieces


def _with_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, share: float | Tensor, part: HeadPart
) -> tuple[Tensor, Tensor, Tensor]:
    """`share` times the sum of the losses, and its gradients by hidden state and weight."""
    chunks = list(zip(_pieces(hidden, part), _pieces(labels, part), strict=True))
    of_hidden = torch.empty_like(hidden)
    of_weight: Tensor | None = None
    losses = []
    for (rows, targets), place in zip(chunks, _pieces(of_hidden, part), strict=True):
        chunk = _Chunk(rows, weight, targets, part)
        losses.append(chunk.loss)
        slope = chunk.gradient(share)
        del chunk
        torch.mm(slope, weight, out=place)
        of_weight = slope.t() @ rows if len(chunks) == 1 else _add_product(of_weight, slope, rows)
        del slope
    assert of_weight is not None
    return torch.stack(losses).sum() * share, of_hidden, of_weight.to(weight.dtype)


def _add_product(total: Tensor | None, slope: Tensor, rows: Tensor) -> Tensor:
    """`total` + slope^T rows, in at least FP32 over all chunks."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    if total is None:
        return (slope.t() @ rows).to(wide)
    if rows.dtype == wide:
        return total.addmm_(slope.t(), rows)
    return total.add_(slope.t() @ rows)


class _Chunk:
    """Logits of some tokens, turned into the loss and then, in the same memory, into their gradient."""

    def __init__(self, rows: Tensor, weight: Tensor, labels: Tensor, part: HeadPart) -> None:
        self._valid = labels != IGNORED
        own = labels - part.first
        self._here = self._valid & (own >= 0) & (own < part.rows)
        self._column = own.clamp(0, weight.shape[0] - 1)[:, None]
        self._dtype = rows.dtype
        logits = rows @ weight.t()
        # FP32 whatever the weights are; the product's own result is given back at once.
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        del logits
        if part.rows < weight.shape[0]:
            values[:, part.rows :] = -torch.inf
        label_logit = values.gather(1, self._column)[:, 0].masked_fill(~self._here, 0.0)
        # A part that is nothing but padding has no largest logit; any finite number does.
        self._largest = values.amax(-1).clamp_min(torch.finfo(values.dtype).min)
        self._values = values.sub_(self._largest[:, None]).exp_()
        normaliser = self._largest + self._values.sum(-1).log()
        if part.group is not None:
            normaliser, label_logit = _over_all_parts(normaliser, label_logit, part.group)
        self._normaliser = normaliser
        self.loss = (normaliser - label_logit).masked_fill(~self._valid, 0.0).sum()

    def gradient(self, share: float | Tensor) -> Tensor:
        """`share` times the loss's gradient by the logits, in the logits' own type. Call it once: it takes the
        memory."""
        weights = torch.exp(self._largest - self._normaliser).masked_fill(~self._valid, 0.0) * share
        values = self._values.mul_(weights[:, None])
        aimed = values.gather(1, self._column) - (self._here.to(values.dtype) * share)[:, None]
        values.scatter_(1, self._column, aimed)
        del self._values
        return values.to(self._dtype)


def _over_all_parts(normaliser: Tensor, label_logit: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """log(sum(exp)) and the label's logit over the whole vocabulary, from those of every part (one all-gather)."""
    mine = torch.stack((normaliser, label_logit))
    ranks = dist.get_world_size(group)
    every = mine.new_empty(2 * ranks, mine.shape[1])
    dist.all_gather_single(every, mine, group=group)
    normalisers, label_logits = every.view(ranks, 2, -1).unbind(1)
    return torch.logsumexp(normalisers, 0), label_logits.sum(0)
