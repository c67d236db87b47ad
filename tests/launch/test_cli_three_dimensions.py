"""3D parallelism from the command line, through Ray, on real text: eight ranks end where one does, in each ZeRO stage.

Long: five trainings, four of them on eight processes.
"""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
THREE_DIMENSIONS = [
    "cluster.gpus_per_node=8", "parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2",
    "training.micro_batch_size=1",
]  # fmt: skip
PATIENCE_SECONDS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("three_dimensions")


def train(folder: Path, name: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One run of the command; its metrics and its summary."""
    words = [
        sys.executable, "-m", "orchestrator", f"run.name={name}", f"run.directory={folder / 'runs'}",
        "model.hidden_size=64", "model.intermediate_size=128", "model.num_attention_heads=4",
        "model.num_key_value_heads=2", "training.sequence_length=64", f"training.steps={STEPS}",
        "training.validate_every_steps=0", "training.validation_sequences=8", "checkpoint.every_steps=0",
        "optimizer.schedule.warmup_steps=2", "data=text", f"data.path={Path(email.__file__).parent / '*.py'}",
        f"data.cache_directory={folder / 'cache'}", f"tracking.uri=sqlite:///{folder / 'mlflow.db'}", *overrides,
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / name
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return records, json.loads((run / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return train(folder, "one_rank", "cluster.gpus_per_node=1", "parallel.data=1")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_eight_ranks_in_three_dimensions_learn_what_one_rank_learns(
    folder: Path, alone: tuple[list[dict[str, Any]], dict[str, Any]], stage: int
) -> None:
    records, summary = train(folder, f"zero_{stage}", *THREE_DIMENSIONS, f"parallel.zero_stage={stage}")
    wanted, ended = alone
    assert len(wanted) == STEPS
    assert wanted[-1]["loss"] < 0.9 * wanted[0]["loss"]
    for key in ("loss", "gradient_norm"):
        assert [record[key] for record in records] == pytest.approx([record[key] for record in wanted], rel=1e-4)
    assert summary["final_loss"] == pytest.approx(ended["final_loss"], abs=1e-5)
    assert summary["validation_loss"] == pytest.approx(ended["validation_loss"], abs=1e-5)
    assert len(summary["peak_memory_bytes"]) == 8
    assert all(sorted(map(len, record["samples"])) == [4, 4] for record in records)
