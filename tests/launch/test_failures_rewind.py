"""`fault_tolerance.on_nan=rewind` through Ray and the real engine: back to a checkpoint, and past the step without its
update."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.soak import Command, Nodes, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_that_meets_nan_goes_back_and_trains_on_as_if_that_step_had_no_update(tmp_path: Path) -> None:
    """A weight of rank 1 turns into NaN at step 12 of the first attempt: loss and gradients of all ranks with it."""
    nodes = Nodes(2, poison="1:12", step_seconds="0")
    words = (
        "checkpoint.every_steps=5",
        "fault_tolerance.on_nan=rewind",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )
    run = Command(nodes, tmp_path, "poisoned", ranks=2, steps=20, words=words)
    try:
        run.start()
        code, said = run.ended()
    finally:
        run.kill()
        left = nodes.close()
    assert code == 0, said
    assert left == []
    assert "Step 12 gave loss nan" in said
    assert "(rewind 1 of" in said
    first, second = run.summary()["attempts"]
    assert (first["cause"], first["last_step"], second["cause"]) == ("nan", 11, "finished")
    assert second["resumed_step"] == run.found(2)
    records = run.records()
    assert [record["step"] for record in records if record.get("skipped")] == [12]
    wanted = undisturbed(tmp_path, steps=20, left_out=(12,))
    assert [record["loss"] for record in records] == [record["loss"] for record in wanted]
    assert [record["samples"] for record in records] == [record["samples"] for record in wanted]
