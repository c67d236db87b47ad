"""Writers that save checkpoints until they are killed; forked from a warm server by `test_checkpoint_kills.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from orchestrator.checkpoint.read import load_newest
from orchestrator.checkpoint.store import CheckpointWriter
from tests.core.run_cases import manifest_of


@dataclass(frozen=True, slots=True)
class Writing:
    """What a group of writers does."""

    directory: str
    numbers: int
    """FP32 numbers that each rank saves."""
    asynchronous: bool
    ranks: int
    port: int
    """Where the ranks meet, on this machine; 0 for one rank."""
    group: str
    """A name of their own in the store at that port."""
    environment: dict[str, str] = field(default_factory=dict)
    """What a writer needs to reach an object store."""


def state_of(step: int, numbers: int, ranks: list[int]) -> dict[str, dict[str, torch.Tensor]]:
    """A tensor of each rank and one of all, saying of which step they are."""
    own = {f"w{rank}": torch.full((numbers,), float(step)) for rank in ranks}
    return {"model": {**own, "b": torch.full((3,), float(step))}}


def save_without_end(said: Connection, writing: Writing, rank: int) -> None:
    """Go on from the newest checkpoint and save step after step, saying of each what became of it.

    Ends by itself only when a save fails, which here means that another rank is dead.
    """
    torch.set_num_threads(1)
    os.environ.update(writing.environment)
    if writing.ranks > 1:
        meeting = dist.TCPStore("127.0.0.1", writing.port, is_master=False, timeout=timedelta(seconds=60))
        store = dist.PrefixStore(writing.group, meeting)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=writing.ranks)
    state = state_of(0, writing.numbers, [rank])
    checkpoint, _ = load_newest(writing.directory, state)
    step = 0 if checkpoint is None else checkpoint.step
    protected = () if checkpoint is None else (checkpoint.path,)
    writer = CheckpointWriter(writing.directory, 2, writing.asynchronous, protected=protected)
    failed = False
    while not failed:
        step += 1
        writer.save(step, state_of(step, writing.numbers, [rank]), manifest_of(step))
        for outcome in writer.take_outcomes():
            said.send(outcome)
            failed = failed or outcome.error is not None
