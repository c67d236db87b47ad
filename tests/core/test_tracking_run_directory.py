"""Which folder a command gets, and every reason why it cannot have it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.errors import ConfigError
from orchestrator.tracking.identity import checkpoint_directory, default_name
from orchestrator.tracking.metrics_log import read_records
from orchestrator.tracking.run_directory import RunDirectory, check_run_directory, open_run
from tests.core.run_cases import run_config, run_plan, step_record


def opened(directory: Path, **overrides: Any) -> RunDirectory:
    config = run_config(directory, {key.replace("__", "."): value for key, value in overrides.items()})
    return open_run(config, run_plan(config))


def ended(run: RunDirectory, status: str) -> None:
    run.write_json("summary.json", {"status": status})
    run.close()


# Names


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", 16),
        ("model.resid_pdrop", 0.1),
        ("training.seed", 1),
        ("training.global_batch_size", 8),
        ("training.steps", 21),
        ("training.precision", "bf16_mixed"),
        ("optimizer.lr", 1e-4),
        ("optimizer.schedule.warmup_steps", 3),
        ("data.tokenizer", "/some/tokenizer.json"),
        ("checkpoint.init_from", "/some/weights"),
        ("checkpoint.resume", "/some/step-00000010"),
    ],
)
def test_what_changes_what_is_learned_changes_the_default_name(tmp_path: Path, key: str, value: Any) -> None:
    assert default_name(run_config(tmp_path, {key: value})) != default_name(run_config(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.micro_batch_size", 2),
        ("training.activation_checkpointing", "full"),
        ("training.compile", True),
        ("training.deterministic", False),
        ("training.validate_every_steps", 5),
        ("parallel.data", 2),
        ("parallel.zero_stage", 3),
        ("cluster.gpus_per_node", 4),
        ("data.cache_directory", "/elsewhere"),
        ("checkpoint.every_steps", 7),
        ("checkpoint.resume", "never"),
        ("tracking.uri", "http://somewhere"),
        ("fault_tolerance.max_restarts", 0),
    ],
)
def test_a_matter_of_speed_or_place_keeps_the_default_name(tmp_path: Path, key: str, value: Any) -> None:
    assert default_name(run_config(tmp_path, {key: value})) == default_name(run_config(tmp_path))


def test_the_default_name_is_the_experiment_and_eight_digits(tmp_path: Path) -> None:
    name, _, digest = default_name(run_config(tmp_path)).rpartition("-")
    assert name == "toy"
    assert len(digest) == 8
    assert int(digest, 16) >= 0


# New, numbered, continued


def test_a_new_run_writes_what_was_asked_and_what_was_decided(tmp_path: Path) -> None:
    run = opened(tmp_path / "runs", run__name="first")
    assert run.path == tmp_path / "runs" / "first"
    assert not run.continues
    assert yaml.safe_load((run.path / "config.yaml").read_text())["model"]["hidden_size"] == 8
    assert json.loads((run.path / "plan.json").read_text())["parallel"]["world_size"] == 2
    assert run.logs.is_dir()
    assert run.checkpoints == str(run.path / "checkpoints")


def test_an_unfinished_run_is_continued_and_says_what_changed(tmp_path: Path) -> None:
    opened(tmp_path, run__name="a", optimizer__lr=1e-3).close()
    run = opened(tmp_path, run__name="a", optimizer__lr=2e-3, training__global_batch_size=8)
    assert run.path == tmp_path / "a"
    assert run.continues
    assert run.changes == {"optimizer.lr": (1e-3, 2e-3), "training.global_batch_size": (4, 8)}
    events = read_records(run.path / "history.jsonl")
    assert events[-1]["changes"] == {"optimizer.lr": [1e-3, 2e-3], "training.global_batch_size": [4, 8]}


def test_a_stopped_run_is_continued_and_its_summary_is_put_aside(tmp_path: Path) -> None:
    ended(opened(tmp_path), "stopped")
    run = opened(tmp_path)
    assert run.continues
    assert not run.summary.exists()
    assert json.loads((run.path / "summary.previous.json").read_text())["status"] == "stopped"


def test_after_a_finished_run_comes_a_numbered_one(tmp_path: Path) -> None:
    ended(opened(tmp_path, run__name="a"), "finished")
    second = opened(tmp_path, run__name="a")
    assert (second.name, second.continues) == ("a-2", False)
    second.close()
    again = opened(tmp_path, run__name="a")
    assert (again.name, again.continues) == ("a-2", True)
    ended(again, "finished")
    assert opened(tmp_path, run__name="a").name == "a-3"


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    ended(opened(tmp_path, run__name="a"), "finished")
    for number in (2, 9, 10):
        shutil.copytree(tmp_path / "a", tmp_path / f"a-{number}")
    assert opened(tmp_path, run__name="a").name == "a-11"


def test_another_runs_own_name_is_not_taken_for_a_number(tmp_path: Path) -> None:
    ended(opened(tmp_path, run__name="a-7"), "finished")
    run = opened(tmp_path, run__name="a")
    assert (run.name, run.continues) == ("a", False)
    ended(run, "finished")
    assert opened(tmp_path, run__name="a").name == "a-8"


def test_resume_never_begins_a_new_run_beside_an_unfinished_one(tmp_path: Path) -> None:
    opened(tmp_path, run__name="a").close()
    assert opened(tmp_path, run__name="a", checkpoint__resume="never").name == "a-2"


def test_a_checkpoint_to_start_from_begins_a_new_run_which_is_then_continued(tmp_path: Path) -> None:
    start = tmp_path / "step-00000010"
    start.mkdir()
    opened(tmp_path, run__name="a").close()
    run = opened(tmp_path, run__name="a", checkpoint__resume=str(start))
    assert (run.name, run.continues) == ("a-2", False)
    run.close()
    run = opened(tmp_path, run__name="a", checkpoint__resume=str(start))
    assert (run.name, run.continues) == ("a-2", True)


def test_a_folder_left_by_a_command_killed_before_it_wrote_anything_is_free(tmp_path: Path) -> None:
    (tmp_path / "a" / "logs").mkdir(parents=True)
    (tmp_path / "a" / ".lock").touch()
    assert not opened(tmp_path, run__name="a").continues


def test_runs_under_one_checkpoint_directory_have_folders_of_their_own(tmp_path: Path) -> None:
    config = run_config(tmp_path, {"checkpoint.directory": str(tmp_path / "shared")})
    assert checkpoint_directory(config, tmp_path / "runs" / "a") == str(tmp_path / "shared" / "a")


# Refusals


@pytest.mark.parametrize("status", [None, "finished"])
@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("model.hidden_size", 8, 16),
        ("data.tokenizer", "bytes", "/some/tokenizer.json"),
        ("data.source", "python_stdlib", "synthetic"),
    ],
)
def test_a_name_taken_by_another_model_or_data_is_refused_with_both_values(
    tmp_path: Path, key: str, before: Any, now: Any, status: str | None
) -> None:
    run = opened(tmp_path, run__name="a")
    ended(run, status) if status else run.close()
    problems = check_run_directory(run_config(tmp_path, {"run.name": "a", key: now}))
    assert [problem.key for problem in problems] == [key]
    assert f"{key}={before}" in problems[0].message
    assert str(now) in problems[0].message
    assert "run.name" in problems[0].fix


@pytest.mark.parametrize(
    ("key", "now"), [("training.seed", 7), ("training.sequence_length", 32), ("optimizer.name", "sgd")]
)
def test_only_an_unfinished_run_refuses_another_seed_length_or_optimizer(tmp_path: Path, key: str, now: Any) -> None:
    run = opened(tmp_path, run__name="a")
    run.close()
    config = run_config(tmp_path, {"run.name": "a", key: now})
    assert [problem.key for problem in check_run_directory(config)] == [key]
    run.write_json("summary.json", {"status": "finished"})
    assert check_run_directory(config) == ()


def test_every_key_of_another_model_is_named_at_once(tmp_path: Path) -> None:
    opened(tmp_path, run__name="a").close()
    changed = {"model.hidden_size": 16, "model.num_hidden_layers": 3, "data.tokenizer": "/t.json"}
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, run__name="a", **{key.replace(".", "__"): value for key, value in changed.items()})
    assert {problem.key for problem in refused.value.problems} == set(changed)


def test_a_second_live_writer_is_refused_and_told_who_holds_the_run_until_that_one_is_dead(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD_A_RUN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        problems = check_run_directory(run_config(tmp_path, {"run.name": "a"}))
        assert [problem.key for problem in problems] == ["run.name"]
        assert f"process {holder.pid} on host" in problems[0].message
        with pytest.raises(ConfigError):
            opened(tmp_path, run__name="a")
    finally:
        holder.kill()
        holder.communicate()
    assert opened(tmp_path, run__name="a").continues, "a killed holder's lock is free"


_HOLD_A_RUN = """
import sys
from pathlib import Path
from tests.core.run_cases import run_config, run_plan
from orchestrator.tracking.run_directory import open_run
config = run_config(sys.argv[1], {"run.name": "a"})
held = open_run(config, run_plan(config))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problems = check_run_directory(run_config(tmp_path / "file" / "runs"))
    assert [problem.key for problem in problems] == ["run.directory"]
    assert "is a file" in problems[0].message


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    problems = check_run_directory(run_config("/proc/runs", {"checkpoint.directory": "/proc/checkpoints"}))
    assert [problem.key for problem in problems] == ["run.directory", "checkpoint.directory"]


def test_a_folder_that_is_no_run_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years of work")
    problems = check_run_directory(run_config(tmp_path, {"run.name": "a"}))
    assert [problem.key for problem in problems] == ["run.name"]
    assert "not the folder of a run" in problems[0].message


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\tb", "a/b", "..", ".hidden", "x" * 201, "é" * 101])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    assert [problem.key for problem in check_run_directory(run_config(tmp_path, {"run.name": name}))] == ["run.name"]


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    assert check_run_directory(run_config(tmp_path / "runs")) == ()
    assert list(tmp_path.iterdir()) == []


# Attempts


def test_a_command_that_was_killed_has_its_attempts_read_from_the_metrics(tmp_path: Path) -> None:
    from orchestrator.tracking.attempts import executed_steps
    from orchestrator.tracking.metrics_log import MetricsLog

    run = opened(tmp_path)
    began = read_records(run.path / "history.jsonl")[-1]["time"]
    log = MetricsLog(run.metrics)
    for step in (1, 2, 3):
        log.append(step_record(step, attempt=1, time=began + step))
    log.rewind(2)
    for step in (3, 4):
        log.append(step_record(step, attempt=2, time=began + 10 + step))
    run.close()
    attempts = opened(tmp_path).attempts()
    assert [(a["cause"], a["first_step"], a["last_step"], a["world_size"]) for a in attempts] == [
        ("restart", 1, 3, 2),
        ("command killed", 3, 4, 2),
    ]
    assert executed_steps(attempts) == 5


def test_attempts_are_numbered_over_all_commands(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.record_attempts([Reported(1, 10), Reported(6, 12)])
    ended(run, "stopped")
    run = opened(tmp_path)
    run.record_attempts([Reported(13, 20)])
    assert [(a["number"], a["first_step"], a["last_step"]) for a in run.attempts()] == [
        (1, 1, 10),
        (2, 6, 12),
        (3, 13, 20),
    ]


class Reported:
    """An attempt as the launcher reports it."""

    def __init__(self, first_step: int, last_step: int) -> None:
        self.values = {"number": 1, "cause": "crash", "first_step": first_step, "last_step": last_step}

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_a_damaged_record_is_named_not_continued(tmp_path: Path) -> None:
    run = opened(tmp_path, run__name="a")
    run.close()
    run.metrics.write_text("not json\n")
    with pytest.raises(ConfigError, match="line 1 is not a JSON object"):
        opened(tmp_path, run__name="a")
