"""Next-token loss: a sum over valid tokens in FP32. Who divides it, and by what, is `step.py`'s business.

A mean is never taken here: micro-batches and ranks may hold different numbers of valid tokens, and a mean of means
weighs them wrongly. A micro-batch without any valid token gives 0 and zero gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from orchestrator.engine.mesh import Mesh

IGNORED = -100
"""Label of a position that is not learned from."""


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies (nats) of the positions whose label is not `IGNORED`.

    logits [batch, sequence, vocabulary] of any floating type, whole or cut along the vocabulary (a DTensor, inside of
    `loss_context`); labels [batch, sequence] int64; returns an FP32 scalar (FP64 for FP64 logits).
    """
    logits = logits.flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = functional.cross_entropy(wide, labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_context(mesh: Mesh) -> AbstractContextManager[None]:
    """What loss and backward pass run in: with tensor parallelism, the loss is computed from logits that stay cut."""
    return loss_parallel() if mesh.tensor.size() > 1 else nullcontext()


def valid_tokens(labels: Tensor) -> int:
    """Positions that are learned from (labels on the host)."""
    return int((labels != IGNORED).sum())
