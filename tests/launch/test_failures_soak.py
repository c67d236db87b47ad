"""A training that is hurt while it runs ends as if nothing had happened: same losses and samples, nothing left over."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch.soak import Command, Nodes

pytestmark = pytest.mark.ray


def test_a_killed_rank_and_a_preempted_node_cost_time_and_nothing_else(tmp_path: Path) -> None:
    """Two faults, two nodes and a spare one: the small sister of the soak below."""
    nodes = Nodes(2)
    words = ("checkpoint.every_steps=10", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}")
    hurt = Command(nodes, tmp_path, "hurt", ranks=2, steps=120, words=words)
    left: list[str] = []
    try:
        hurt.start()
        hurt.wait_for_steps(13, attempt=1)
        hurt.signal(1, signal.SIGKILL, attempt=1)
        hurt.wait_for_steps(5, attempt=2)
        nodes.add()
        leaving = hurt.place(1, attempt=2)["node_id"]
        nodes.drain(leaving, seconds=60)
        code, said = hurt.ended()
        left = nodes.ranks_running()
    finally:
        hurt.kill()
        remains = nodes.close()
    assert code == 0, said
    assert (left, remains) == ([], [])
    first, second, third = hurt.summary()["attempts"]
    assert [first["cause"], second["cause"], third["cause"]] == ["crash", "preemption", "finished"]
    assert second["resumed_step"] == 10
    assert third["resumed_step"] == second["last_step"], "the ranks save before they move"
    assert hurt.place(1, attempt=3)["node_id"] != leaving
    assert second["recovery_seconds"] is not None
    assert third["recovery_seconds"] is not None
    assert [record["step"] for record in hurt.records()] == list(range(1, 121))
    undisturbed = _alone(tmp_path, steps=120)
    assert [record["loss"] for record in hurt.records()] == [record["loss"] for record in undisturbed]
    assert [record["samples"] for record in hurt.records()] == [record["samples"] for record in undisturbed]


def _alone(folder: Path, *, steps: int, ranks: int = 2) -> list[dict[str, Any]]:
    """The record of the same training without Ray and without faults."""
    from orchestrator import load_config, make_plan
    from orchestrator.tracking.metrics_log import read_records
    from tests.engine.cases import tasks_of
    from tests.engine.gloo import live

    sizes = Command.settings(ranks=ranks, steps=steps, cache=folder / "cache")
    plan = make_plan(load_config([*sizes, f"run.directory={folder}", f"tracking.uri=sqlite:///{folder / 'x.db'}"]))
    live(tasks_of(plan, folder / "alone"))
    return list(read_records(folder / "alone" / "metrics.jsonl"))
