"""The command as a user types it, with the real engine and a cluster of its own: crash, stop, continue, record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.folder import newest_complete
from orchestrator.tracking.attempts import executed_steps

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 300, 50
PATIENCE_SECONDS = 240


class Command:
    """A training of a very small model on a very small text."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run = folder / "runs" / name
        self.folder = folder
        self.words = [
            sys.executable, "-m", "orchestrator", f"run.name={name}", f"run.directory={folder / 'runs'}",
            "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2",
            "model.num_attention_heads=4", "model.max_position_embeddings=64", "training.sequence_length=64",
            "training.global_batch_size=4", "training.micro_batch_size=2", f"training.steps={STEPS}",
            "training.validate_every_steps=0", "training.validation_sequences=8", f"checkpoint.every_steps={EVERY}",
            "data=text", f"data.path={folder / 'text'}", "data.validation_fraction=0.2",
            f"data.cache_directory={folder / 'cache'}", f"tracking.uri=sqlite:///{folder / 'mlflow.db'}",
        ]  # fmt: skip

    def start(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.Popen(
            self.words,
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def records(self) -> list[dict[str, Any]]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def summary(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        return values

    def wait_for_step(self, process: subprocess.Popen[str], step: int) -> None:
        def reached() -> bool:
            assert process.poll() is None, process.communicate()
            return any(record["step"] >= step for record in self.records())

        wait_until(reached)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert "Traceback" not in out + err
    return process.returncode, out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("end_to_end")
    (folder / "text").mkdir()
    for number in range(40):
        words = " ".join(f"word{number * index % 97}" for index in range(200))
        (folder / "text" / f"{number}.txt").write_text(words, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> tuple[Command, str]:
    command = Command(folder, "unbroken")
    code, out, err = ended(command.start())
    assert (code, err) == (0, ""), err
    return command, out


@pytest.fixture(scope="module")
def broken(folder: Path) -> tuple[Command, list[tuple[int, str, str]]]:
    """Rank 1 killed once a checkpoint is complete, then Ctrl-C, then the same command again."""
    command = Command(folder, "broken")
    process = command.start()
    command.wait_for_step(process, EVERY + 10)
    wait_until(lambda: newest_complete(command.run / "checkpoints") is not None)
    table = json.loads((command.run / "placement.json").read_text(encoding="utf-8"))
    os.kill(next(entry["pid"] for entry in table if entry["rank"] == 1), signal.SIGKILL)
    wait_until(lambda: any(record["attempt"] == 2 and record["step"] > EVERY + 20 for record in command.records()))
    process.send_signal(signal.SIGINT)
    first = ended(process)
    return command, [first, ended(command.start())]


def test_a_run_ends_with_its_folder_and_every_file_of_the_contract(unbroken: tuple[Command, str]) -> None:
    command, out = unbroken
    assert out.splitlines()[-1] == str(command.run)
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "placement.json", "summary.json", "logs"):
        assert (command.run / name).exists()
    summary = command.summary()
    assert (summary["status"], summary["steps"], len(summary["attempts"])) == ("finished", STEPS, 1)
    assert summary["checkpoint"]
    # A busy machine may not have sent everything when the command ends; then the closing lines say how to.
    assert (summary["mlflow_run_id"] or "python -m orchestrator.tracking.forward") in out


def test_the_console_says_each_thing_once_and_nothing_of_the_framework(unbroken: tuple[Command, str]) -> None:
    _, out = unbroken
    lines = [line for line in out.splitlines() if line]
    assert len(lines) == len(set(lines))
    assert not [line for line in lines if "INFO" in line or "WARNING" in line or "(raylet)" in line]
    assert "validation loss" in out
    assert "bigram model" in out


def test_a_killed_rank_and_a_stop_cost_only_steps_since_the_last_checkpoint(
    broken: tuple[Command, list[tuple[int, str, str]]],
) -> None:
    command, ((stopped, said, _), (finished, _, _)) = broken
    assert (stopped, finished) == (4, 0)
    assert "killed by SIGKILL" in said
    assert "the same command continues it" in said
    attempts = command.summary()["attempts"]
    assert [attempt["cause"] for attempt in attempts] == ["crash", "stopped", "finished"]
    resumed = attempts[1]["resumed_step"]
    assert resumed >= EVERY
    assert resumed % EVERY == 0
    assert attempts[1]["first_step"] == resumed + 1
    assert attempts[2]["first_step"] == attempts[1]["last_step"] + 1
    assert executed_steps(attempts) == STEPS + attempts[0]["last_step"] - resumed


def test_the_loss_of_every_step_is_that_of_the_unbroken_run_bit_for_bit(
    unbroken: tuple[Command, str], broken: tuple[Command, list[tuple[int, str, str]]]
) -> None:
    straight, mended = unbroken[0].records(), broken[0].records()
    assert [record["step"] for record in mended] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in mended] == [record["loss"] for record in straight]
    assert [record["samples"] for record in mended] == [record["samples"] for record in straight]
    assert broken[0].summary()["validation_loss"] == unbroken[0].summary()["validation_loss"]


def test_every_sample_of_a_step_is_on_one_rank_and_ranks_have_equal_shares(unbroken: tuple[Command, str]) -> None:
    for record in unbroken[0].records():
        ids = [sample for share in record["samples"] for sample in share]
        assert len(ids) == len(set(ids)) == 4
        assert record["tokens_per_data_rank"] == [record["tokens"] / 2] * 2
