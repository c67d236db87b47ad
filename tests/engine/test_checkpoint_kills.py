"""Kill -9 at any moment of a save: there is always a complete checkpoint, and none is taken for good that is not.

Writers are forked from a warm server and killed at moments spread over a save; what they leave is judged byte by byte.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.checkpoint.folder import TEMPORARY, committed_folders, faults_of_folder, newest_complete
from orchestrator.checkpoint.read import load_newest
from orchestrator.checkpoint.store import CheckpointWriter, SaveOutcome
from tests.engine.checkpoint_writers import Writing, save_without_end, state_of

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


def kill_writers(directory: Path, kills: int, numbers: int, ranks: int, seed: int) -> Tally:
    """Start and kill writers; after every kill, check what lies in the folder."""
    moments = random.Random(seed)
    tally = Tally()
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    for number in range(kills):
        asynchronous = number % 2 == 0
        port = 0 if meeting is None else meeting.port
        writing = Writing(str(directory), numbers, asynchronous, ranks, port, group=f"{number}")
        # Each rank alone in turn, then all at once.
        victims = list(range(ranks)) if number % (ranks + 1) == ranks else [number % (ranks + 1)]
        with writers(writing) as group:
            reported, unfinished_then = kill_some(directory, group, victims, moments.random())
        tally.kills += 1
        tally.inside += unfinished_then
        tally.committed = max(reported, tally.committed)
        committed = committed_folders(directory)
        faults = {str(folder): faults_of_folder(folder, read_bytes=True) for _, folder in committed}
        assert not any(faults.values()), f"kill {number} left a folder with a checkpoint's name: {faults}"
        found = newest_complete(directory)
        assert found is not None, f"kill {number} lost the last complete checkpoint"
        assert found.step >= tally.committed, f"kill {number} lost a checkpoint that was reported as committed"
    return tally


@dataclass
class Group:
    """Running writers and the lines on which they report, by rank."""

    processes: list[BaseProcess]
    lines: list[Connection]


@contextmanager
def writers(writing: Writing) -> Iterator[Group]:
    """Start one writer a rank; none of them lives on afterwards."""
    group = Group([], [])
    try:
        for rank in range(writing.ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process: BaseProcess = _CONTEXT.Process(target=save_without_end, args=(sender, writing, rank), daemon=True)
            process.start()
            sender.close()
            group.processes.append(process)
            group.lines.append(receiver)
        yield group
    finally:
        for process in group.processes:
            process.kill()
            process.join()


def kill_some(directory: Path, group: Group, victims: list[int], moment: float) -> tuple[int, bool]:
    """Let the writers commit, kill some of them `moment` (0 to 1) through one of the next saves.

    Returns the newest step that any of them reported as committed, and whether a save was unfinished right then.
    """
    line = group.lines[0]
    assert line.poll(_TIMEOUT_SECONDS), "the writers committed nothing"
    outcome: SaveOutcome = line.recv()
    assert outcome.error is None
    wait_for_another_save(directory, outcome.step + 1)
    time.sleep(moment * outcome.write_seconds)
    for rank in victims:
        group.processes[rank].kill()
        group.processes[rank].join()
    unfinished_then = bool(unfinished(directory))
    # Who is left must find out alone: a save cannot be finished without the dead one.
    for rank, process in enumerate(group.processes):
        process.join(_TIMEOUT_SECONDS)
        assert not process.is_alive(), f"rank {rank} goes on without the ranks {victims}"
    steps = [outcome.step, *(step for line in group.lines for step in committed_steps(line))]
    return max(steps), unfinished_then


def wait_for_another_save(directory: Path, step: int) -> None:
    """Until a save of this step or a later one has its first byte, or is over already."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not unfinished(directory) and max(number for number, _ in committed_folders(directory)) <= step:
        assert time.monotonic() < deadline, "the writers stopped saving"


def committed_steps(line: Connection) -> list[int]:
    """Steps that a writer, dead by now, still had reported as committed."""
    steps = []
    while line.poll():
        try:
            outcome: SaveOutcome = line.recv()
        except EOFError:
            break
        if outcome.error is None:
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


def check(directory: Path, kills: int, numbers: int, least_inside: int, ranks: int = 1, seed: int = 1) -> Tally:
    tally = kill_writers(directory, kills, numbers, ranks, seed)
    assert tally.kills == kills
    assert tally.inside >= least_inside, f"only {tally.inside} of {kills} kills came inside a save"
    state = state_of(0, numbers, list(range(ranks)))
    checkpoint, passed_over = load_newest(directory, state)
    assert checkpoint is not None
    assert passed_over == []
    for rank in range(ranks):
        assert torch.equal(state["model"][f"w{rank}"], torch.full((numbers,), float(checkpoint.step)))
    CheckpointWriter(directory, 2, asynchronous=False)
    assert all(not path.name.startswith(".") for path in directory.iterdir()), "the next writer cleans up"
    return tally


def test_no_kill_loses_the_last_complete_checkpoint(tmp_path: Path) -> None:
    check(tmp_path, kills=14, numbers=4_000_000, least_inside=3)


def test_no_kill_of_one_rank_or_all_loses_the_last_complete_checkpoint(tmp_path: Path) -> None:
    check(tmp_path, kills=6, numbers=4_000_000, least_inside=1, ranks=2)


LARGE = 52_500_000
"""FP32 numbers of each rank: 210 MB."""


@pytest.fixture(scope="module")
def so_far() -> Tally:
    """Of all parts together."""
    return Tally()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seed"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (2, 7), (2, 8)])
def test_no_kill_among_two_hundred_during_large_saves_loses_the_last_complete_checkpoint(
    tmp_path: Path, ranks: int, seed: int, so_far: Tally
) -> None:
    """Eight times 25 kills, at least seven of each 25 between the first byte of a save and its rename (-rP)."""
    tally = check(tmp_path, kills=25, numbers=LARGE, least_inside=7, ranks=ranks, seed=seed)
    so_far.kills += tally.kills
    so_far.inside += tally.inside
    print(f"{tally.kills} kills, {tally.inside} between the first byte of a save and its rename; ", end="")
    print(f"so far {so_far.kills} and {so_far.inside}")
