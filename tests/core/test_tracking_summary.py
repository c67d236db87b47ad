"""`summary.json`, rates and where the MLflow record goes."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tracking.attempts import executed_steps
from orchestrator.tracking.destination import artifact_location, check_tracking, how_to_look, resolve_uri, shown
from orchestrator.tracking.metrics_log import MetricsLog
from orchestrator.tracking.rates import cluster_peak_flops, measured_pace, model_flops_utilization, peak_flops_of
from orchestrator.tracking.summary import build_summary
from tests.core.run_cases import run_config, run_plan, step_record

PEAKS = {"fp32": 19.5, "bf16": 312, "fp16": 311}


def with_peaks(precision: str, **more: Any) -> Any:
    gpu = {"name": "A100", "memory_gib": 79.2, "peak_tflops": PEAKS}
    return run_config("runs", {"cluster.gpu": gpu, "training.precision": precision, **more})


@pytest.mark.parametrize(
    ("precision", "tera"), [("fp32", 19.5), ("bf16_mixed", 312), ("bf16_pure", 312), ("fp16_mixed", 311)]
)
def test_the_peak_is_that_of_the_precision_computed_in(precision: str, tera: float) -> None:
    config = with_peaks(precision)
    assert peak_flops_of(config.cluster.gpu, config.training.precision) == tera * 1e12


def test_mfu_is_model_flops_over_the_peak_of_all_gpus() -> None:
    # 6000 FLOP a token, 1e9 tokens/s on two GPUs of 312 TFLOP/s: 6e12 / 624e12.
    assert model_flops_utilization(run_plan(with_peaks("bf16_mixed")), 1e9) == pytest.approx(6 / 624)


def test_mfu_is_unknown_without_a_peak_and_without_a_rate() -> None:
    assert model_flops_utilization(run_plan(run_config("runs")), 1e9) is None
    assert model_flops_utilization(run_plan(with_peaks("fp32")), None) is None


def test_unlike_nodes_count_with_the_slowest_kind() -> None:
    slow = {"nodes": 1, "gpus_per_node": 1, "gpu": {"name": "V", "memory_gib": 32, "peak_tflops": {"bf16": 100}}}
    fast = {"nodes": 1, "gpus_per_node": 1, "gpu": {"name": "A", "memory_gib": 80, "peak_tflops": {"bf16": 312}}}
    config = with_peaks("bf16_mixed", **{"cluster.node_groups": [fast, slow]})
    assert cluster_peak_flops(config.cluster, "bf16_mixed", 4) == 400e12


def test_the_pace_leaves_out_the_first_step_of_each_attempt() -> None:
    records = [
        step_record(1, step_seconds=9.0),
        step_record(2, step_seconds=0.5),
        step_record(3, attempt=2, step_seconds=9.0),
        step_record(4, attempt=2, step_seconds=1.5),
    ]
    assert measured_pace(records) == (1.0, 64.0)


def test_one_single_step_is_its_own_pace_and_none_has_no_pace() -> None:
    assert measured_pace([step_record(1, step_seconds=2.0)]) == (2.0, 32.0)
    assert measured_pace([]) == (None, None)


def summary_of(folder: Path, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "run_directory": folder,
        "status": "finished",
        "attempts": [],
        "rank_results": {},
        "checkpoint": None,
    }
    return build_summary(run_plan(run_config(folder)), **{**arguments, **changes})


def test_the_summary_has_every_key_of_the_contract_also_when_nothing_ran(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, status="failed")
    assert summary.keys() >= {
        "status",
        "steps",
        "final_loss",
        "validation_loss",
        "tokens_per_second",
        "mfu",
        "peak_memory_bytes",
        "seconds_to_first_step",
        "attempts",
        "predicted",
        "measured",
        "mlflow_run_id",
        "checkpoint",
    }
    assert summary["status"] == "failed"
    assert (summary["steps"], summary["final_loss"], summary["tokens_per_second"]) == (0, None, None)


def test_the_summary_tells_what_was_recorded(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step_record(1, validation_loss=3.0))
    log.append(step_record(2))
    (tmp_path / "tracking.json").write_text('{"run_id": "abc"}')
    summary = summary_of(
        tmp_path,
        rank_results={1: {"peak_memory_bytes": 7}, 0: {"peak_memory_bytes": 5, "seconds_to_first_step": 2.5}},
        checkpoint="/run/checkpoints/step-00000002",
    )
    assert (summary["steps"], summary["final_loss"], summary["validation_loss"]) == (2, 2.0, 3.0)
    assert summary["peak_memory_bytes"] == [5, 7]
    assert summary["measured"] == {"step_seconds": 0.5, "tokens_per_second": 128.0, "mfu": None, "peak_bytes": 7}
    assert summary["predicted"].keys() == summary["measured"].keys()
    assert summary["seconds_to_first_step"] == 2.5
    assert summary["mlflow_run_id"] == "abc"


@pytest.mark.parametrize(
    ("ranks", "recorded", "told"),
    [
        ({0: "flash_cpu", 1: "flash_cpu"}, None, "flash_cpu"),
        ({0: "flash", 1: "math, flash"}, None, "flash, math"),
        ({0: None, 1: None}, None, None),
        # The ranks were killed before they could say how they ended; the record says what it saw.
        ({}, "efficient", "efficient"),
    ],
)
def test_the_summary_names_every_attention_kernel_that_ran_on_any_rank(
    ranks: dict[int, str | None], recorded: str | None, told: str | None, tmp_path: Path
) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").append(step_record(1, attention_kernel=recorded))
    results = {rank: {"attention_kernel": kernel} for rank, kernel in ranks.items()}
    assert summary_of(tmp_path, rank_results=results)["attention_kernel"] == told


def test_executed_steps_are_the_sum_over_attempts() -> None:
    attempts: list[dict[str, int | None]] = [
        {"first_step": 1, "last_step": 14},
        {"first_step": None, "last_step": None},
        {"first_step": 11, "last_step": 20},
    ]
    assert executed_steps(attempts) == 24


# Where the record goes


@pytest.mark.parametrize(
    ("asked", "variable", "expected"),
    [
        (None, None, "sqlite:////home/ml/mlflow.db"),
        (None, "http://server:5000", "http://server:5000"),
        ("http://mine", "http://server:5000", "http://mine"),
        ("sqlite:///notes/m.db", None, "sqlite:////home/ml/notes/m.db"),
        ("sqlite:////data/m.db", None, "sqlite:////data/m.db"),
    ],
)
def test_the_tracking_uri_is_the_asked_one_the_variables_or_a_file_here(
    asked: str | None, variable: str | None, expected: str
) -> None:
    environment = {} if variable is None else {"MLFLOW_TRACKING_URI": variable}
    assert resolve_uri(asked, environment, Path("/home/ml")) == expected


def test_files_go_beside_a_database_and_where_a_server_says() -> None:
    assert artifact_location("sqlite:////home/ml/mlflow.db", "a/b") == "file:///home/ml/mlruns/a_b"
    assert artifact_location("http://server", "a") is None


def test_a_password_is_never_shown() -> None:
    assert shown("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
    assert "secret" not in how_to_look("http://me:secret@host:80")


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "htp://server", "s3://bucket"])
def test_a_store_that_mlflow_cannot_write_to_is_refused_before_anything_starts(uri: str, tmp_path: Path) -> None:
    problems = check_tracking(run_config(tmp_path, {"tracking.uri": uri}), {}, tmp_path)
    assert [problem.key for problem in problems] == ["tracking.uri"]
    assert uri in problems[0].message


def test_a_database_in_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, {"tracking.uri": "sqlite:///gone/m.db"})
    assert "does not exist" in check_tracking(config, {}, tmp_path)[0].message


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("sqlite:////proc/m.db", "nothing can be made in /proc"),
        ("sqlite:///folder", "is a folder"),
        ("sqlite:///text.db", "is not a SQLite database"),
        ("sqlite:///text.db/m.db", "is a file, not a folder"),
        ("sqlite://text.db", "three slashes"),
        ("sqlite://", "names no file"),
        ("http://", "names no server"),
        ("http://host:port", "names no server"),
    ],
)
def test_a_store_that_could_never_be_opened_is_refused_and_nothing_is_made(uri: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.db").write_text("not a database")
    (problem,) = check_tracking(run_config(tmp_path, {"tracking.uri": uri}), {}, tmp_path)
    assert problem.key == "tracking.uri"
    assert why in problem.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "text.db"]


def test_a_default_that_cannot_be_used_is_named_as_the_default(tmp_path: Path) -> None:
    (problem,) = check_tracking(run_config(tmp_path), {}, Path("/proc"))
    assert problem.message.startswith("The default store sqlite:////proc/mlflow.db cannot be used")


def test_a_database_new_empty_or_there_is_taken_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with contextlib.closing(sqlite3.connect(tmp_path / "there.db")) as database:
        database.execute("CREATE TABLE runs (id)")
    for name in ("new.db", "empty.db", "there.db"):
        assert check_tracking(run_config(tmp_path, {"tracking.uri": f"sqlite:///{name}"}), {}, tmp_path) == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.db", "there.db"]


def test_what_is_shown_to_be_typed_can_be_typed() -> None:
    assert how_to_look("sqlite:////my runs/m.db") == "mlflow ui --backend-store-uri 'sqlite:////my runs/m.db'"


@pytest.mark.parametrize("uri", [None, "http://127.0.0.1:1", "postgresql+psycopg2://host/db"])
def test_a_server_that_may_be_down_is_no_reason_to_refuse(uri: str | None, tmp_path: Path) -> None:
    overrides = {} if uri is None else {"tracking.uri": uri}
    assert check_tracking(run_config(tmp_path, overrides), {}, tmp_path) == ()
