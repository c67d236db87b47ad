"""A training that is hurt while it runs ends as if nothing had happened: same losses and samples, nothing left over."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.launch.soak import Command, Nodes, undisturbed
from tests.tracking.runs import create_database
from tests.tracking.test_tracking_forwarder import Server

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soaked]:
    """Ten faults of eight kinds on four nodes, one after the other."""
    folder = tmp_path_factory.mktemp("soak")
    create_database(folder / "server.db")
    nodes = Nodes(4)
    server = Server(folder)
    words = (
        "checkpoint.every_steps=5", f"tracking.uri={server.uri}", "fault_tolerance.step_timeout_seconds=10",
        "fault_tolerance.max_node_losses=3", "fault_tolerance.replan_after_seconds=3",
        "fault_tolerance.placement_timeout_seconds=20",
    )  # fmt: skip
    run = Command(nodes, folder, "soak", ranks=4, steps=STEPS, words=words)
    newest: list[int] = []
    try:
        server.start()
        server.wait()
        run.start()
        _hurt(run, nodes, server, newest)
        code, said = run.ended()
        left = nodes.ranks_running()
    finally:
        run.kill()
        remains = nodes.close()
        if server.running:
            server.stop()
    yield Soaked(run, code, said, newest, left + remains, undisturbed(folder, steps=STEPS, ranks=4))


STEPS = 85


@dataclass
class Soaked:
    """What came of it."""

    run: Command
    code: int
    said: str
    newest: list[int]
    """Step of the newest complete checkpoint after each failure that ended an attempt."""
    left: list[str]
    undisturbed: list[dict[str, Any]]


def _hurt(run: Command, nodes: Nodes, server: Server, newest: list[int]) -> None:
    def ended(attempt: int) -> None:
        """Until the attempt has failed, before the next has saved."""
        run.wait(lambda: len(run.events("restart")) >= attempt, f"attempt {attempt} ends")
        newest.append(run.newest())

    # A slow rank, a full disk and a lost tracking server end nothing.
    run.wait_for_steps(2, attempt=1)
    slow = run.press("slow-3", "0.5")
    run.wait(lambda: any(event["rank"] == 3 for event in run.events("straggler")), "the slow rank is named")
    slow.unlink()
    run.limit_writing(1, 4096, attempt=1)
    run.wait(lambda: any(event["error"] for event in run.events("checkpoint")), "a save fails")
    run.limit_writing(1, -1, attempt=1)
    server.stop()
    failed = len(run.events("checkpoint"))
    run.wait(lambda: [e for e in run.events("checkpoint")[failed:] if not e["error"]], "the next save succeeds")

    run.signal(2, signal.SIGKILL, attempt=1)
    ended(1)
    run.wait_for_steps(6, attempt=2)
    run.signal(1, signal.SIGSTOP, attempt=2)
    ended(2)
    run.wait_for_steps(6, attempt=3)
    run.press("block-0")
    ended(3)
    run.wait_for_steps(6, attempt=4)
    nodes.add()
    nodes.drain(run.place(3, attempt=4)["node_id"], seconds=60)
    ended(4)
    run.wait_for_steps(6, attempt=5)
    nodes.add()
    nodes.remove(run.place(1, attempt=5)["node_id"])
    ended(5)
    run.wait_for_steps(6, attempt=6)
    run.signal(0, signal.SIGKILL, attempt=6)
    ended(6)
    run.wait_for_steps(6, attempt=7)
    nodes.remove(run.place(2, attempt=7)["node_id"])  # and no other comes: three nodes go on
    ended(7)


CAUSES = ["crash", "hang", "hang", "preemption", "node_loss", "crash", "node_loss", "finished"]


@pytest.mark.slow
def test_ten_faults_of_eight_kinds_leave_losses_and_samples_as_they_were(soak: Soaked) -> None:
    assert soak.code == 0, soak.said
    records = soak.run.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [record["loss"] for record in records]
    wanted = [record["loss"] for record in soak.undisturbed]
    on_four = soak.run.summary()["attempts"][-1]["first_step"] - 1
    assert losses[:on_four] == wanted[:on_four], "on as many nodes every bit is the same"
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert [_flat(record) for record in records] == [_flat(record) for record in soak.undisturbed]
    assert [record["learning_rate"] for record in records] == [record["learning_rate"] for record in soak.undisturbed]


def _flat(record: dict[str, Any]) -> list[int]:
    return [sample for share in record["samples"] for sample in share]


@pytest.mark.slow
def test_each_attempt_goes_on_from_the_newest_complete_checkpoint_and_its_recovery_is_timed(soak: Soaked) -> None:
    attempts = soak.run.summary()["attempts"]
    assert [attempt["cause"] for attempt in attempts] == CAUSES
    assert [attempt["resumed_step"] for attempt in attempts[1:]] == soak.newest
    assert [attempt["first_step"] for attempt in attempts[1:]] == [step + 1 for step in soak.newest]
    assert all(attempt["recovery_seconds"] is not None for attempt in attempts[1:])
    for attempt, mended in itertools.pairwise(attempts):
        print(f"{attempt['cause']:10} at {attempt['last_step']}: again after {mended['recovery_seconds']:.1f} s")


@pytest.mark.slow
def test_what_ends_no_attempt_is_said_and_what_does_is_named(soak: Soaked) -> None:
    messages = [event["message"] for event in soak.run.events("restart")]
    assert "rank 2 on" in messages[0] and "killed by SIGKILL" in messages[0]
    assert "rank 1 on" in messages[1] and "its process is stopped" in messages[1]
    assert "rank 0 on" in messages[2] and "reading, step" in messages[2] and "no progress for" in messages[2]
    assert "is about to be taken away" in messages[3]
    assert any(event["error"] for event in soak.run.events("checkpoint"))
    assert any(event["rank"] == 3 for event in soak.run.events("straggler"))
    (replanned,) = soak.run.events("replanned")
    assert replanned["world_size"] == 3
    assert "orchestrator.tracking.forward" in soak.said, "what the lost server missed can be sent later"


@pytest.mark.slow
def test_nothing_of_it_runs_on(soak: Soaked) -> None:
    assert soak.left == []
