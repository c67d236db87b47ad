"""Writers that save checkpoints until they are killed; forked from a warm server by `test_checkpoint_kills.py`."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from orchestrator.checkpoint.read import load_newest
from orchestrator.checkpoint.store import CheckpointWriter
from tests.core.run_cases import manifest_of


def state_of(step: int, numbers: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two tensors that say of which step they are."""
    return {"model": {"w": torch.full((numbers,), float(step)), "b": torch.full((3,), float(step))}}


def save_without_end(said: Connection, directory: str, numbers: int, asynchronous: bool) -> None:
    """Go on from the newest checkpoint and save step after step, saying of each what became of it."""
    torch.set_num_threads(1)
    state = state_of(0, numbers)
    checkpoint, _ = load_newest(directory, state)
    step = 0 if checkpoint is None else checkpoint.step
    writer = CheckpointWriter(directory, 2, asynchronous, protected=() if checkpoint is None else (checkpoint.path,))
    while True:
        step += 1
        writer.save(step, state_of(step, numbers), manifest_of(step))
        for outcome in writer.take_outcomes():
            said.send(outcome)
