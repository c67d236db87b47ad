"""Samples of a step as micro-batches on the device: which ids, read from the token cache, cut into inputs and labels.

The order is `data/order.py`'s (a function of seed and step); this file only asks for this data rank's part of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from orchestrator.checkpoint.manifest import Manifest
from orchestrator.data.dataset import TokenDataset
from orchestrator.data.order import START, Position, SampleOrder, shard
from orchestrator.engine.loss import IGNORED, valid_tokens
from orchestrator.engine.mesh import Mesh
from orchestrator.engine.step import MicroBatch

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepFeed:
    """What one data rank reads in one step."""

    ids: Ids
    """Sample ids [micro_batches, micro_batch]."""
    batches: tuple[MicroBatch, ...]
    tokens: int
    """Valid tokens in them."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The training samples of one data rank."""

    dataset: TokenDataset
    order: SampleOrder
    global_batch: int
    """Sequences of one step over all data ranks."""
    micro_batch: int
    mesh: Mesh
    device: torch.device
    start: Position = START
    """Where the batches began to have this size."""

    def step(self, step: int) -> StepFeed:
        """What this data rank reads in optimizer step `step` (1 is the first)."""
        whole = self.order.ids(step, self.global_batch, self.start)
        ids = shard(whole, self.mesh.data_rank, self.mesh.data_ranks, self.micro_batch)
        tokens = self.dataset.sample(ids.ravel()).reshape(*ids.shape, -1)
        labels = [valid_tokens(torch.from_numpy(rows[:, 1:])) for rows in tokens]
        return StepFeed(ids, tuple(micro_batch(rows, self.device) for rows in tokens), sum(labels))


def position_after(feed: Feed, step: int) -> dict[str, int]:
    """Where the data order stands after a step, as a checkpoint keeps it."""
    place = feed.order.after(step, feed.global_batch, feed.start)
    return {"seed": feed.order.seed, "samples": feed.order.samples, **asdict(place)}


def position_of(manifest: Manifest, order: SampleOrder) -> Position:
    """Where the data order goes on from a checkpoint, whatever size its batches had."""
    saved = manifest.data_position
    if "offset" in saved:
        return Position(saved["step"], saved["epoch"], saved["offset"])
    return order.after(manifest.step, manifest.config["training"]["global_batch_size"])  # written before it was kept


def micro_batch(tokens: npt.NDArray[np.integer], device: torch.device) -> MicroBatch:
    """Cut sequences [micro_batch, sequence + 1] into inputs and the labels one position ahead, on the device."""
    rows = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return MicroBatch(rows[:, :-1], rows[:, 1:])


def unlearned(shape: tuple[int, int], device: torch.device) -> MicroBatch:
    """A micro-batch of `shape` without a valid token, for a rank that has nothing to read while others do."""
    zeros = torch.zeros(shape, dtype=torch.int64, device=device)
    return MicroBatch(zeros, torch.full_like(zeros, IGNORED))
