"""Validation loss: the mean over all tokens of a fixed set of sequences, whatever the ranks and the accumulation.

The sequences are dealt out over the data ranks; every rank runs the same number of forward passes (a rank that has run
out reads sequences without valid tokens), so that collectives inside a forward pass always meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.data.dataset import TokenDataset
from orchestrator.engine.feed import micro_batch, unlearned
from orchestrator.engine.loss import IGNORED
from orchestrator.engine.step import MicroBatch, Parts


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a validation came to; the same on every rank."""

    loss: float
    """Nats per token."""
    nats_per_byte: float | None
    """Nats per byte of text: comparable between tokenizers; None for tokens that are no text."""


@torch.no_grad()
def evaluate(parts: Parts, dataset: TokenDataset, sequences: int, batch: int) -> Evaluation:
    """Mean loss over the first `sequences` samples of `dataset` (all, if there are fewer), `batch` at a time
    (collective)."""
    count = min(sequences, len(dataset))
    ranks, mine = parts.mesh.data_ranks, parts.mesh.data_rank
    ids = np.arange(mine, count, ranks, dtype=np.int64)
    rounds = math.ceil(math.ceil(count / ranks) / batch)
    length = dataset.sample(np.zeros(1, dtype=np.int64)).shape[1] - 1
    sums = torch.zeros(2, dtype=torch.float64, device=parts.device)
    for stage in parts.stages:
        stage.eval()
    for index in range(rounds):
        chosen = ids[index * batch : (index + 1) * batch]
        read = (
            micro_batch(dataset.sample(chosen), parts.device) if chosen.size else unlearned((1, length), parts.device)
        )
        sums[0] += _summed(parts, read).double()
        sums[1] += (read.labels != IGNORED).sum()
    for stage, data_parallel in zip(parts.stages, parts.data_parallel, strict=True):
        stage.train()
        data_parallel.end_evaluation()
    if not parts.mesh.speaks_for_samples:
        sums.zero_()
    if parts.mesh.whole.size() > 1:
        dist.all_reduce(sums)
    total, tokens = sums.tolist()
    loss = total / tokens
    size = dataset.bytes_per_token
    return Evaluation(loss=loss, nats_per_byte=None if size is None else loss / size)


def _summed(parts: Parts, read: MicroBatch) -> Tensor:
    if parts.pipeline is not None:
        return parts.pipeline.evaluate(read)
    (model,) = parts.stages
    assert parts.head is not None
    with parts.head.learning(read.labels):
        loss: Tensor = model(read.inputs)
    return loss
