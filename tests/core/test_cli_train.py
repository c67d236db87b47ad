"""`train` around the launcher: what it writes, prints and returns. Launcher and forwarder are in-memory fakes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.closing import attention_row
from orchestrator.cli.main import main
from orchestrator.errors import PlacementError, Problem
from orchestrator.launch.request import Attempt, LaunchOutcome, LaunchRequest
from orchestrator.tracking.forward import TrackingResult
from orchestrator.tracking.metrics_log import MetricsLog
from tests.core.test_checkpoint_folder import checkpoint

TABLE = [
    {"rank": rank, "share": 0, "local_rank": rank, "node_id": "n", "node_name": "host", "node": 0, "device": rank,
     "data": rank, "pipeline": 0, "context": 0, "tensor": 0}
    for rank in (0, 1)
]  # fmt: skip


BASE = ("training.steps=3", "training.sequence_length=32", "optimizer.schedule.warmup_steps=1")
TEXT = ("data=text", "data.path=text", "data.cache_directory=cache", "data.validation_fraction=0.2")


class FakeLaunch:
    """Runs `steps` steps at once and ends as told."""

    def __init__(self, status: str = "finished", steps: int = 3, problems: tuple[Problem, ...] = ()) -> None:
        self.status, self.steps, self.problems = status, steps, problems
        self.requests: list[LaunchRequest] = []

    def __call__(self, request: LaunchRequest, observe: Callable[[dict[str, Any]], None]) -> LaunchOutcome:
        self.requests.append(request)
        observe({"kind": "placement", "attempt": 1, "table": TABLE})
        ranks = [{"rank": rank, "host": "host", "pid": 100 + rank, "device": "cpu"} for rank in (0, 1)]
        observe({"kind": "ready", "attempt": 1, "ranks": ranks})
        log = MetricsLog(Path(request.run_directory) / "metrics.jsonl")
        for step in range(1, self.steps + 1):
            record = {"step": step, "attempt": 1, "loss": 5.0 - step, "tokens": 512, "step_seconds": 0.5,
                      "tokens_per_second": 1024.0, "time": float(step)}  # fmt: skip
            if step == self.steps and self.status == "finished":
                record |= {"validation_loss": 2.0, "validation_nats_per_byte": 1.5}
            log.append(record)
            observe({"kind": "step", **record})
        attempt = Attempt(1, self.status, "", 1, self.steps, 2.0, 2)
        results = {rank: {"peak_memory_bytes": 100 + rank, "seconds_to_first_step": 4.0} for rank in (0, 1)}
        return LaunchOutcome(self.status, (attempt,), results, self.problems, (), (("imports", 1.0),))  # type: ignore[arg-type]


class FakeForwarder:
    """Tracking that is always complete."""

    def __init__(self) -> None:
        self.killed = False

    def finish(self, **_: object) -> TrackingResult:
        return TrackingResult(
            True, "run-id-1", "sqlite:////tmp/m.db", "mlflow ui --backend-store-uri sqlite:////tmp/m.db"
        )

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def forwarder(monkeypatch: pytest.MonkeyPatch) -> FakeForwarder:
    fake = FakeForwarder()
    monkeypatch.setattr("orchestrator.tracking.forward.start_forwarder", lambda directory: fake)
    return fake


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forwarder: FakeForwarder, capsys: pytest.CaptureFixture[str]
):
    """Run `train` on a small text; returns (exit code, stdout lines, stderr)."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the {number} quick brown foxes jump over dogs\n" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(launch: Any, *words: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr("orchestrator.launch.run.launch", launch)
        code = main([*BASE, *(() if "data=synthetic" in words else TEXT), *words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out.splitlines(), captured.err

    return run


def summary_of(folder: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    return values


def test_a_finished_run_says_where_everything_is_and_its_folder_last(train, tmp_path: Path) -> None:
    code, lines, errors = train(FakeLaunch())
    folder = Path(lines[-1])
    assert (code, errors) == (0, "")
    assert folder.parent == tmp_path / "runs"
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "placement.json", "summary.json", "logs"):
        assert (folder / name).exists()
    text = "\n".join(lines)
    assert "finished after step 3, 1,024 tokens/s, first step after 4 s" in text
    assert f"{folder}/summary.json" in text
    assert "mlflow ui --backend-store-uri sqlite:////tmp/m.db" in text
    assert "run-id-1" in text
    assert json.loads((folder / "placement.json").read_text()) == [
        {**entry, "host": "host", "pid": 100 + entry["rank"], "device_name": "cpu"} for entry in TABLE
    ]


def test_the_validation_loss_stands_beside_that_of_a_bigram_model(train) -> None:
    _, lines, _ = train(FakeLaunch())
    line = next(line for line in lines if line.startswith("validation loss"))
    assert "1.5000 nats a byte" in line
    assert "above the" in line  # pairs of this text are easily counted
    assert "bigram model of the same tokens (add-k, k = " in line


def test_random_tokens_have_no_baseline_and_it_is_said_why(train) -> None:
    _, lines, _ = train(FakeLaunch(), "data=synthetic")
    assert any("no bigram baseline: random tokens have nothing to learn" in line for line in lines)


def test_the_summary_has_the_contract_s_fields(train) -> None:
    _, lines, _ = train(FakeLaunch())
    summary = summary_of(lines[-1])
    assert {
        "status", "steps", "final_loss", "validation_loss", "tokens_per_second", "mfu", "peak_memory_bytes",
        "seconds_to_first_step", "attempts", "predicted", "measured", "mlflow_run_id", "checkpoint",
    } <= set(summary)  # fmt: skip
    assert (summary["status"], summary["steps"], summary["final_loss"]) == ("finished", 3, 2.0)
    assert summary["peak_memory_bytes"] == [100, 101]
    assert summary["mlflow_run_id"] == "run-id-1"
    assert {"cause", "first_step", "last_step", "seconds", "world_size"} <= set(summary["attempts"][0])


@pytest.mark.parametrize(
    ("kernel", "row"),
    [
        ("flash_cpu", "torch's flash kernel for CPUs (flash_cpu)"),
        ("flash, math", "FlashAttention (flash); no fused kernel: scores are kept as a matrix (math)"),
        ("one_of_tomorrow", "one_of_tomorrow (one_of_tomorrow)"),
        (None, ""),
    ],
)
def test_the_last_lines_name_the_attention_kernel_that_ran(kernel: str | None, row: str) -> None:
    assert attention_row({"attention_kernel": kernel}) == row


def test_a_stopped_run_ends_with_4_and_the_same_command_continues_it(train) -> None:
    code, lines, _ = train(FakeLaunch("stopped", steps=2))
    assert code == 4
    assert any(line.startswith("to go on") and "the same command" in line for line in lines)
    again, more, _ = train(FakeLaunch())
    assert again == 0
    assert more[-1] == lines[-1]
    assert any("continues the unfinished run" in line for line in more)


def test_a_finished_run_is_followed_by_a_new_numbered_one(train) -> None:
    _, lines, _ = train(FakeLaunch())
    _, more, _ = train(FakeLaunch())
    assert more[-1] == f"{lines[-1]}-2"


def test_a_failed_run_ends_with_3_and_its_reasons_on_stderr(train) -> None:
    code, lines, errors = train(FakeLaunch("failed", problems=(Problem("", "rank 1 on host: it broke.", "See logs."),)))
    assert code == 3
    assert errors.startswith("The run failed.\n1. rank 1 on host: it broke.\n   -> See logs.")
    assert summary_of(lines[-1])["status"] == "failed"


def test_a_plan_that_cannot_be_placed_ends_with_2_and_leaves_no_forwarder(train, forwarder: FakeForwarder) -> None:
    def launch(request: LaunchRequest, observe: object) -> LaunchOutcome:
        raise PlacementError(Problem("cluster", "4 GPUs are free, 8 are needed.", "Wait."))

    code, _, errors = train(launch)
    assert code == 2
    assert "4 GPUs are free" in errors
    assert forwarder.killed


def test_everything_that_is_wrong_is_told_before_anything_is_written(train, tmp_path: Path) -> None:
    launch = FakeLaunch()
    before = sorted(tmp_path.iterdir())
    code, lines, errors = train(
        launch, "training.steps=x", "model.vocab_size=100", "data.tokenizer=no/such.json",
        "training.global_batch_size=7", "tracking.uri=foo:bar", "run.name=a/b", "model.hiden_size=1",
        "checkpoint.resume=nowhere",
    )  # fmt: skip
    assert (code, lines) == (2, [])
    for told in ("training.steps: It is set twice", "no key `model.hiden_size`", "data.tokenizer: ", "tracking.uri: ",
                 "run.name: ", "checkpoint.resume: ", "training.global_batch_size: "):  # fmt: skip
        assert told in errors
    assert not launch.requests
    assert sorted(tmp_path.iterdir()) in (before, sorted([*before, tmp_path / "cache"]))


def test_a_name_of_another_model_is_refused_naming_the_key(train) -> None:
    train(FakeLaunch(), "run.name=mine")
    code, _, errors = train(FakeLaunch(), "run.name=mine", "model.hidden_size=96")
    assert code == 2
    assert "model.hidden_size: Run 'mine' was started with model.hidden_size=192" in errors


def test_a_sweep_trains_every_combination_in_turn(train) -> None:
    launch = FakeLaunch()
    code, lines, _ = train(launch, "training.seed=0,1", "optimizer.lr=1e-3,1e-4", "-m")
    assert code == 0
    assert [line for line in lines if line.startswith("---")] == [
        "--- 1 of 4: training.seed=0 optimizer.lr=0.001",
        "--- 2 of 4: training.seed=0 optimizer.lr=0.0001",
        "--- 3 of 4: training.seed=1 optimizer.lr=0.001",
        "--- 4 of 4: training.seed=1 optimizer.lr=0.0001",
    ]
    configs = [request.plan.config for request in launch.requests]
    assert [(config.training.seed, config.optimizer.lr) for config in configs] == [
        (0, 1e-3), (0, 1e-4), (1, 1e-3), (1, 1e-4),
    ]  # fmt: skip
    assert len({request.run_directory for request in launch.requests}) == 4


def test_a_sweep_with_one_wrong_job_starts_none(train) -> None:
    launch = FakeLaunch()
    code, _, errors = train(launch, "training.global_batch_size=16,7", "-m")
    assert code == 2
    assert "(job 2: " in errors
    assert not launch.requests


def test_a_stop_ends_a_sweep(train) -> None:
    launch = FakeLaunch("stopped", steps=1)
    code, _, _ = train(launch, "training.seed=0,1", "-m")
    assert code == 4
    assert len(launch.requests) == 1


def test_groups_can_be_swept_by_pattern(train) -> None:
    launch = FakeLaunch()
    train(launch, "optimizer=glob(sg*)", "-m")
    assert [request.plan.config.optimizer.name for request in launch.requests] == ["sgd"]


@pytest.mark.parametrize(
    ("words", "told"),
    [(["optimizer=glob(x*)"], "matches no option"), (["training.seed=range(0,5000)"], "5,000 jobs")],
)
def test_a_sweep_over_nothing_or_far_too_much_is_refused(train, words: list[str], told: str) -> None:
    code, _, errors = train(FakeLaunch(), *words, "-m")
    assert code == 2
    assert told in errors


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 4), ("failed", 3)])
def test_a_training_whose_output_nobody_reads_any_more_goes_on_to_its_own_end(
    train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, code: int
) -> None:
    read, write = os.pipe()
    problems = (Problem("", "Rank 0 died.", ""),) if status == "failed" else ()
    launch = FakeLaunch(status, problems=problems)

    def and_the_reader_leaves(request: LaunchRequest, observe: Callable[[dict[str, Any]], None]) -> LaunchOutcome:
        os.close(read)
        return launch(request, observe)

    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        assert train(and_the_reader_leaves, "run.name=unread")[0] == code
    assert summary_of(str(tmp_path / "runs" / "unread"))["status"] == status


def test_a_full_disk_behind_the_output_takes_lines_from_a_training_and_nothing_else(
    train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, errors = train(FakeLaunch(), "run.name=full")
    assert code == 0
    assert "No space left on device" in errors
    assert summary_of(str(tmp_path / "runs" / "full"))["status"] == "finished"


def test_a_run_that_is_further_than_what_is_asked_for_is_refused_and_left_as_it_is(train) -> None:
    _, lines, _ = train(FakeLaunch("stopped"))
    folder = Path(lines[-1])
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    saved["training"]["steps"] = 9  # it was begun with more than is asked for below
    checkpoint(folder / "checkpoints", 3, config=saved)
    launch = FakeLaunch()
    code, _, errors = train(launch)
    assert (code, launch.requests) == (2, [])
    assert "training.steps: This run is at step 3 of 9 already" in errors
    assert summary_of(str(folder))["status"] == "stopped"


@pytest.mark.parametrize("name", ["x" * 300, "é" * 150])
def test_a_name_too_long_for_a_folder_is_refused_before_anything_looks_for_it(train, name: str) -> None:
    code, _, errors = train(FakeLaunch(), f"run.name={name}")
    assert code == 2
    assert "run.name: run.name=" in errors
    assert "it has 300 bytes" in errors


def test_steps_that_are_in_no_checkpoint_are_named_with_the_reason_and_how_to_get_them(train) -> None:
    class Full(FakeLaunch):
        def __call__(self, request: LaunchRequest, observe: Callable[[dict[str, Any]], None]) -> LaunchOutcome:
            checkpoint(Path(request.run_directory) / "checkpoints", 1)
            full = {"path": None, "error": "rank 1: No space left on device"}
            observe({"kind": "checkpoint", "step": 2, **full})
            return super().__call__(request, observe)

    code, lines, _ = train(Full())
    assert code == 0
    assert "steps 2 to 3 are in no checkpoint: it could not be written (rank 1: No space left on device)" in lines
    on = next(line for line in lines if line.startswith("to go on"))
    assert "training.steps=3" in on
    assert "step-00000001" in on
