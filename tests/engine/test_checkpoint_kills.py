"""Kill -9 at any moment of a save: there is always a complete checkpoint, and none is taken for good that is not.

Writers are forked from a warm server and killed at moments spread over a save; what they leave is judged byte by byte.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.folder import TEMPORARY, committed_folders, faults_of_folder, newest_complete
from orchestrator.checkpoint.read import load_newest
from orchestrator.checkpoint.store import CheckpointWriter, SaveOutcome
from tests.engine.checkpoint_writers import save_without_end, state_of

pytestmark = pytest.mark.torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "orchestrator.engine.rank", "tests.engine.gloo"])

_TIMEOUT_SECONDS = 60


@dataclass
class Tally:
    """What the kills hit."""

    kills: int = 0
    inside: int = 0
    """Kills between the first byte of a save and its rename."""
    committed: int = 0
    """Newest step that a writer has reported as committed."""


def kill_writers(directory: Path, kills: int, numbers: int) -> Tally:
    """Start and kill writers; after every kill, check what lies in the folder."""
    moments = random.Random(1)
    tally = Tally()
    for number in range(kills):
        reported = kill_one(directory, numbers, asynchronous=number % 2 == 0, moment=moments.random())
        tally.kills += 1
        tally.inside += bool(unfinished(directory))
        tally.committed = max(reported, tally.committed)
        found = newest_complete(directory, read_bytes=True)
        assert found is not None, f"kill {number} lost the last complete checkpoint"
        assert found.step >= tally.committed, f"kill {number} lost a checkpoint that was reported as committed"
        faults = {path.name: faults_of_folder(path, read_bytes=True) for _, path in committed_folders(directory)}
        assert not any(faults.values()), f"kill {number} left a folder with a checkpoint's name: {faults}"
    return tally


def kill_one(directory: Path, numbers: int, *, asynchronous: bool, moment: float) -> int:
    """Let a writer commit, kill it `moment` (0 to 1) through one of its next saves; the newest step it reported."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    arguments = (sender, str(directory), numbers, asynchronous)
    writer = _CONTEXT.Process(target=save_without_end, args=arguments, daemon=True)
    writer.start()
    sender.close()
    try:
        assert receiver.poll(_TIMEOUT_SECONDS), "the writer committed nothing"
        outcome: SaveOutcome = receiver.recv()
        wait_for_another_save(directory, outcome.step + 1)
        time.sleep(moment * outcome.write_seconds)
    finally:
        writer.kill()
        writer.join()
    return max(outcome.step, *reported_steps(receiver), 0)


def wait_for_another_save(directory: Path, step: int) -> None:
    """Until a save of this step or a later one has its first byte, or is over already."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not unfinished(directory) and max(number for number, _ in committed_folders(directory)) <= step:
        assert time.monotonic() < deadline, "the writer stopped saving"


def reported_steps(receiver: Connection) -> list[int]:
    """Steps that the dead writer still had reported."""
    steps = []
    while receiver.poll():
        try:
            outcome: SaveOutcome = receiver.recv()
        except EOFError:
            break
        assert outcome.error is None
        steps.append(outcome.step)
    return steps


def unfinished(directory: Path) -> list[Path]:
    """Folders of saves that have written something and have no name yet."""
    found = []
    for path in directory.iterdir():
        if path.name.startswith(TEMPORARY):
            try:
                if any(entry.stat().st_size for entry in path.iterdir()):
                    found.append(path)
            except FileNotFoundError:
                continue  # It got its name, or a file in it did, while we looked.
    return found


def check(directory: Path, kills: int, numbers: int, least_inside: int) -> None:
    tally = kill_writers(directory, kills, numbers)
    assert tally.kills == kills
    assert tally.inside >= least_inside, f"only {tally.inside} of {kills} kills came inside a save"
    state = state_of(0, numbers)
    checkpoint, passed_over = load_newest(directory, state)
    assert checkpoint is not None
    assert passed_over == []
    assert torch.equal(state["model"]["w"], torch.full((numbers,), float(checkpoint.step)))
    CheckpointWriter(directory, 2, asynchronous=False)
    assert all(not path.name.startswith(".") for path in directory.iterdir()), "the next writer cleans up"


def test_no_kill_loses_the_last_complete_checkpoint(tmp_path: Path) -> None:
    check(tmp_path, kills=16, numbers=500_000, least_inside=4)


@pytest.mark.slow
def test_no_kill_among_two_hundred_during_large_saves_loses_the_last_complete_checkpoint(tmp_path: Path) -> None:
    check(tmp_path, kills=200, numbers=10_000_000, least_inside=50)
