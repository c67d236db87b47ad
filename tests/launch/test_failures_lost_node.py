"""A node that dies without a word, and no other comes: lost for the run long before Ray says so, and three go on.

`python -m pytest -m slow tests/launch/test_failures_lost_node.py -s` prints what the way back consists of, beside the
start of the same command. Here Ray would take minutes to miss the node, and busy nodes would be waited for longer than
that: whoever takes one for the other does not come back in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.launch.soak import Command, Nodes, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 40
REPLAN_AFTER_SECONDS = 3


@dataclass
class Lost:
    """What came of it."""

    run: Command
    code: int = -1
    said: str = ""
    alive_for_ray: bool = False
    """Whether Ray still counted the node as alive when the run went on without it."""
    left: list[str] = field(default_factory=list)
    undisturbed: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    """Four ranks on four nodes, one of which is killed with everything on it."""
    folder = tmp_path_factory.mktemp("lost")
    nodes = Nodes(4)
    words = (
        "checkpoint.every_steps=5", f"tracking.uri=sqlite:///{folder / 'mlflow.db'}",
        f"fault_tolerance.replan_after_seconds={REPLAN_AFTER_SECONDS}", "fault_tolerance.placement_timeout_seconds=600",
    )  # fmt: skip
    lost = Lost(Command(nodes, folder, "lost", ranks=4, steps=STEPS, words=words))
    try:
        lost.run.start()
        lost.run.wait_for_steps(8, attempt=1)
        node = lost.run.place(2, attempt=1)["node_id"]
        nodes.remove(node)
        lost.run.wait_for_steps(1, attempt=2)
        lost.alive_for_ray = nodes.alive(node)
        lost.code, lost.said = lost.run.ended()
    finally:
        lost.run.kill()
        lost.left = nodes.close()
    lost.undisturbed = undisturbed(folder, steps=STEPS, ranks=4)
    yield lost


def test_the_run_goes_on_with_three_while_ray_still_counts_four(lost: Lost) -> None:
    assert lost.code == 0, lost.said
    assert lost.alive_for_ray
    assert [attempt["cause"] for attempt in lost.run.summary()["attempts"]] == ["node_loss", "finished"]
    (replanned,) = lost.run.events("replanned")
    assert replanned["world_size"] == 3
    assert replanned["reason"] == "needs 4 CPU slots; 3 nodes hold 1 + 1 + 1; 1 node that does not answer not counted."
    assert "planned anew for 3 ranks, same global batch: parallel.data 4 -> 3" in lost.said


def test_losses_and_samples_are_as_without_the_loss(lost: Lost) -> None:
    records = lost.run.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    alone = [record["loss"] for record in lost.undisturbed]
    assert [record["loss"] for record in records] == pytest.approx(alone, abs=1e-5)
    assert [_flat(record) for record in records] == [_flat(record) for record in lost.undisturbed]


def _flat(record: dict[str, Any]) -> list[int]:
    return [sample for share in record["samples"] for sample in share]


def test_the_way_back_is_as_long_as_the_start_and_what_was_asked_to_be_waited(lost: Lost) -> None:
    print(f"\n{lost.run.report()}")
    summary = lost.run.summary()
    cold, back = sum(summary["start_seconds"].values()), summary["attempts"][1]
    parts = back["recovery_parts"]
    wait = sum(parts.get(part, 0.0) for part in ("noticed", "killed", "waiting", "nodes"))
    print(f"{wait:.2f} s until nodes were chosen, of which {REPLAN_AFTER_SECONDS} s are replan_after_seconds")
    assert back["recovery_seconds"] == pytest.approx(sum(parts.values()))
    assert back["recovery_seconds"] - REPLAN_AFTER_SECONDS <= 1.5 * cold


def test_nothing_of_it_runs_on(lost: Lost) -> None:
    assert lost.left == []


def test_a_machine_that_falls_silent_is_left_out_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    """Its lines stay open, as when a cable is pulled: ranks hang, do not end when they are killed, and one goes on.
    When its node is lost too, the silent one is back, and the run goes on there."""
    nodes = Nodes(2)
    words = (
        "checkpoint.every_steps=5", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}",
        f"fault_tolerance.replan_after_seconds={REPLAN_AFTER_SECONDS}", "fault_tolerance.placement_timeout_seconds=600",
        "fault_tolerance.step_timeout_seconds=5",
    )  # fmt: skip
    run = Command(nodes, tmp_path, "silent", ranks=2, steps=STEPS, words=words)
    try:
        run.start()
        run.wait_for_steps(8, attempt=1)
        silent = run.place(1, attempt=1)["node_id"]
        with nodes.held(silent, everything=True):
            run.wait_for_steps(3, attempt=2)
            run.hold()  # it shall not be over before the node is back
            other = run.place(0, attempt=2)["node_id"]
        nodes.remove(other)
        run.wait(lambda: len(run.events("restart")) == 2, "the second loss is noticed")
        run.release()
        code, said = run.ended()
    finally:
        run.kill()
        left = nodes.close()
    assert code == 0, said
    assert other != silent
    assert run.place(0, attempt=3)["node_id"] == silent
    assert [attempt["cause"] for attempt in run.summary()["attempts"]] == ["hang", "node_loss", "finished"]
    assert [event["world_size"] for event in run.events("replanned")] == [1]
    assert [record["step"] for record in run.records()] == list(range(1, STEPS + 1))
    assert left == []
