"""A training that is hurt while it runs ends as if nothing had happened: same losses and samples, nothing left over.

`python -m pytest -m slow tests/launch/test_failures_soak.py -s` prints how long each way back took, beside the start of
the same command, and judges it with room for a machine that has other things to do. `test_failures_placement.py` has
the short form, without times.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.launch.soak import Command, Nodes, undisturbed
from tests.tracking.runs import create_database
from tests.tracking.test_tracking_forwarder import Server

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 100
STEP_TIMEOUT_SECONDS = 10
REPLAN_AFTER_SECONDS = 3
"""Asked to be waited before three go on; a node that was taken for busy would be waited for much longer."""
CAUSES = ["crash", "hang", "hang", "preemption", "node_loss", "crash", "node_loss", "finished"]
IN_PLACE = (2, 3, 4, 7)
"""Attempts on the nodes of the attempt before."""


@dataclass
class Soaked:
    """What came of it."""

    run: Command
    hurt_at: list[float] = field(default_factory=list)
    """`time.time()` of each fault that ended an attempt."""
    code: int = -1
    said: str = ""
    sent: str = ""
    """What the command said that sent the record later."""
    tags: dict[str, str] = field(default_factory=dict)
    """Of the run in MLflow, then."""
    left: list[str] = field(default_factory=list)
    undisturbed: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soaked]:
    """Ten faults of eight kinds on four nodes, one after the other."""
    folder = tmp_path_factory.mktemp("soak")
    create_database(folder / "server.db")
    nodes = Nodes(4)
    server = Server(folder)
    words = (
        "checkpoint.every_steps=5", f"tracking.uri={server.uri}",
        f"fault_tolerance.step_timeout_seconds={STEP_TIMEOUT_SECONDS}", "fault_tolerance.max_node_losses=3",
        f"fault_tolerance.replan_after_seconds={REPLAN_AFTER_SECONDS}", "fault_tolerance.placement_timeout_seconds=600",
    )  # fmt: skip
    soaked = Soaked(Command(nodes, folder, "soak", ranks=4, steps=STEPS, words=words))
    try:
        server.start()
        server.wait()
        soaked.run.start()
        _hurt(soaked, nodes, server)
        soaked.code, soaked.said = soaked.run.ended()
        soaked.left = nodes.ranks_running()
        server.start()
        server.wait()
        _send_later(soaked, server)
    finally:
        soaked.run.kill()
        if server.running:
            server.stop()
        soaked.left += nodes.close()
    soaked.undisturbed = undisturbed(folder, steps=STEPS, ranks=4)
    yield soaked


def _hurt(soaked: Soaked, nodes: Nodes, server: Server) -> None:
    run = soaked.run

    @contextmanager
    def ends(attempt: int) -> Iterator[None]:
        """The fault in the block ends an attempt that has done some steps."""
        run.wait_for_steps(6, attempt=attempt)
        soaked.hurt_at.append(time.time())
        yield
        run.wait(lambda: len(run.events("restart")) >= attempt, f"attempt {attempt} ends")

    def spare_node() -> None:
        run.hold()
        nodes.add()

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

    with ends(1):
        run.signal(2, signal.SIGKILL, attempt=1)
    with ends(2):
        run.signal(1, signal.SIGSTOP, attempt=2)
    with ends(3):
        run.press("block-0")
    run.wait_for_steps(4, attempt=4)
    spare_node()
    with ends(4):
        nodes.drain(run.place(3, attempt=4)["node_id"], seconds=60)
    run.release()
    run.wait_for_steps(4, attempt=5)
    spare_node()
    run.release()
    with ends(5):
        nodes.remove(run.place(1, attempt=5)["node_id"])
    with ends(6):
        run.signal(0, signal.SIGKILL, attempt=6)
    with ends(7):
        nodes.remove(run.place(2, attempt=7)["node_id"])  # and no other comes: three nodes go on


def _send_later(soaked: Soaked, server: Server) -> None:
    from mlflow.tracking import MlflowClient

    command = [sys.executable, "-m", "orchestrator.tracking.forward", str(soaked.run.run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    soaked.sent = done.stdout + done.stderr
    if done.returncode == 0:
        soaked.tags = MlflowClient(server.uri).get_run(soaked.run.summary()["mlflow_run_id"]).data.tags


def test_ten_faults_of_eight_kinds_leave_losses_and_samples_as_they_were(soak: Soaked) -> None:
    assert soak.code == 0, soak.said
    records = soak.run.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [record["loss"] for record in records]
    wanted = [record["loss"] for record in soak.undisturbed]
    on_four = soak.run.summary()["attempts"][-1]["first_step"] - 1
    assert losses[:on_four] == wanted[:on_four], "on as many nodes every bit is the same"
    assert losses == pytest.approx(wanted, abs=1e-5)
    off = max(abs(loss - alone) for loss, alone in zip(losses, wanted, strict=True))
    print(f"\nlosses are equal in every bit until step {on_four}, on fewer nodes after it to within {off:.1e}")
    assert soak.run.summary()["final_loss"] == losses[-1]
    assert [_flat(record) for record in records] == [_flat(record) for record in soak.undisturbed]
    assert [record["learning_rate"] for record in records] == [record["learning_rate"] for record in soak.undisturbed]


def _flat(record: dict[str, Any]) -> list[int]:
    return [sample for share in record["samples"] for sample in share]


def test_each_attempt_goes_on_from_the_newest_complete_checkpoint(soak: Soaked) -> None:
    attempts = soak.run.summary()["attempts"]
    assert [attempt["cause"] for attempt in attempts] == CAUSES
    saved = [event for event in soak.run.events("checkpoint") if not event["error"]]
    for before, after in itertools.pairwise(attempts):
        newest = soak.run.found(after["number"])
        assert after["resumed_step"] == newest
        assert after["first_step"] == newest + 1
        assert newest >= max(event["step"] for event in saved if event["attempt"] <= before["number"])


def test_the_way_back_to_work_is_recorded_in_parts_and_short(soak: Soaked) -> None:
    print(f"\n{soak.run.report()}")
    summary = soak.run.summary()
    cold = sum(summary["start_seconds"].values())
    named = [event["time"] for event in soak.run.events("restart")]
    for attempt, hurt, told in zip(summary["attempts"][1:], soak.hurt_at, named, strict=True):
        parts, number = attempt["recovery_parts"], attempt["number"]
        print(f"attempt {number} mends what was named {told - hurt:.2f} s after it was done")
        assert attempt["recovery_seconds"] == pytest.approx(sum(parts.values()))
        to_work = attempt["recovery_seconds"] - parts["noticed"]
        if summary["attempts"][number - 2]["cause"] == "hang":
            assert parts["noticed"] <= STEP_TIMEOUT_SECONDS + 10
            assert told - hurt <= STEP_TIMEOUT_SECONDS + 10
        if number in IN_PLACE:
            assert to_work - parts["data and checkpoint"] <= max(3, cold / 10), "3 s, more where all takes longer"
        else:
            asked = REPLAN_AFTER_SECONDS if number == len(CAUSES) else 0
            wait = sum(parts.get(part, 0.0) for part in ("killed", "waiting", "nodes"))
            print(f"  {wait:.2f} s until its nodes were chosen, of which {asked} s are replan_after_seconds")
            assert to_work - asked <= 1.5 * cold, "as a cold start, apart from what was asked to be waited"


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


def test_mlflow_knows_causes_restarts_and_recoveries_once_its_server_is_back(soak: Soaked) -> None:
    assert soak.tags, soak.sent
    attempts = soak.run.summary()["attempts"]
    assert soak.tags["orchestrator.causes"] == ", ".join(CAUSES)
    assert soak.tags["orchestrator.restarts"] == str(len(attempts) - 1)
    recoveries = [f"{attempt['recovery_seconds']:.1f}" for attempt in attempts[1:]]
    assert soak.tags["orchestrator.recovery_seconds"] == ", ".join(recoveries)


def test_nothing_of_it_runs_on(soak: Soaked) -> None:
    assert soak.left == []
