"""Which runs are the same training, which of them was best at what, and how that is said. No MLflow."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from orchestrator.cli.compare_page import page
from orchestrator.cli.compare_table import cells, plan_text, render_comparison
from orchestrator.tracking.comparison import Comparison, RunRecord, compare
from orchestrator.tracking.identity import default_name, flatten, learned_settings
from tests.core.run_cases import run_config

PLAN = {"data": 4, "tensor": 1, "pipeline": 1, "context": 1, "zero_stage": 0, "zero_group": 1, "world_size": 4}


def texts(values: dict[str, Any]) -> dict[str, str]:
    """Dotted keys and their values as MLflow keeps them."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flatten(values).items()}


def record(name: str, *, rate: float | None = 100.0, plan: dict[str, Any] | None = None, **changes: Any) -> RunRecord:
    """A finished run of the test configuration; `settings`, `metrics` and `tags` are put over what it has."""
    settings = texts(run_config("runs").to_dict())
    decided = texts({"plan": PLAN | (plan or {})})
    metrics = {"loss": 2.0, "validation_nats_per_byte": 1.5, "predicted.tokens_per_second": 80.0}
    if rate is not None:
        metrics["measured.tokens_per_second"] = rate
    return RunRecord(
        run_id=changes.pop("run_id", f"{name}-id"),
        name=name,
        status=changes.pop("status", "FINISHED"),
        started_ms=changes.pop("started_ms", 1_700_000_000_000),
        steps=20,
        parameters=settings | decided | changes.pop("settings", {}),
        metrics=metrics | changes.pop("metrics", {}),
        tags={"orchestrator.restarts": "0"} | changes.pop("tags", {}),
    )


def shown(found: Comparison, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    render_comparison(found, console)
    return console.file.getvalue()


def test_plans_of_one_training_are_compared_the_fastest_first() -> None:
    found = compare([record("slow", rate=50), record("fast", rate=150), record("middle", rate=100)])
    (training,) = found.trainings
    assert [run.name for run in found.runs] == ["fast", "middle", "slow"]
    assert (training.fastest, training.advantage) == ("fast-id", 1.5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.tensor", "8"),
        ("training.micro_batch_size", "2"),
        ("training.activation_checkpointing", "full"),
        ("checkpoint.every_steps", "7"),
        ("checkpoint.resume", "never"),
        ("run.name", "other"),
    ],
)
def test_what_changes_only_speed_and_memory_is_the_same_training(key: str, value: str) -> None:
    assert len(compare([record("a"), record("b", settings={key: value})]).trainings) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", "16"),
        ("training.global_batch_size", "8"),
        ("training.precision", "bf16_mixed"),
        ("optimizer.lr", "0.1"),
        ("optimizer.schedule.warmup_steps", "3"),
        ("data.path", "other/"),
        ("checkpoint.init_from", "weights/"),
        ("checkpoint.resume", "runs/a/checkpoints/step-00000010"),
    ],
)
def test_what_changes_what_is_learned_is_another_training_and_named_no_faster(key: str, value: str) -> None:
    found = compare([record("a", rate=50), record("b", settings={key: value})])
    assert [training.fastest for training in found.trainings] == [None, None]
    assert set(found.settings) == {key}


def test_the_settings_that_name_a_run_are_those_that_make_it_the_same_training() -> None:
    """`default_name` and `compare` follow one rule: from a configuration and from the texts that MLflow keeps."""
    changes = ["parallel.tensor", "training.compile", "training.seed", "optimizer.name", "data.validation_fraction"]
    values = [2, True, 7, "sgd", 0.25]
    for key, value in zip(changes, values, strict=True):
        configs = [run_config("runs"), run_config("runs", {key: value})]
        learned = [learned_settings(texts(config.to_dict())) for config in configs]
        assert (default_name(configs[0]) == default_name(configs[1])) == (learned[0] == learned[1]), key


def test_final_losses_of_one_training_are_held_together() -> None:
    runs = [record("a"), record("b", metrics={"loss": 2.002}), record("c", status="FAILED", metrics={"loss": 3.0})]
    (training,) = compare(runs).trainings
    assert training.loss_spread == pytest.approx(0.001)
    assert "final losses of the 2 finished runs differ by at most 1.0e-03" in " ".join(shown(compare(runs)).split())


def test_a_price_makes_tokens_cost_something_and_names_the_cheapest() -> None:
    priced = {"cluster.gpu.price_per_hour": "1.8"}
    four = record("four", rate=4000, settings=priced)
    two = record("two", rate=2500, settings=priced, plan={"data": 2, "world_size": 2})
    found = compare([four, two])
    by_name = {run.name: run for run in found.runs}
    # 4 GPUs at 1.80 an hour: 7.20 for 4000 x 3600 tokens.
    assert by_name["four"].cost_per_billion_tokens == pytest.approx(7.2 / (4000 * 3600) * 1e9)
    assert found.trainings[0].fastest == "four-id"
    assert found.trainings[0].cheapest == "two-id"


def test_no_price_no_cost() -> None:
    (run,) = compare([record("a")]).runs
    assert run.cost_per_billion_tokens is None


def test_measured_stands_beside_predicted() -> None:
    (run,) = compare([record("a", rate=100, metrics={"measured.peak_bytes": 90.0, "predicted.peak_bytes": 100.0})]).runs
    assert run.difference["tokens_per_second"] == pytest.approx(0.25)
    assert run.difference["peak_bytes"] == pytest.approx(-0.1)
    assert run.difference["mfu"] is None


def test_a_run_that_goes_on_shows_its_newest_step() -> None:
    latest = {"tokens_per_second": 60.0, "memory_bytes": 5.0, "step_seconds": 0.5}
    (run,) = compare([record("a", rate=None, status="RUNNING", metrics=latest)]).runs
    assert run.status == "running"
    assert (run.measured["tokens_per_second"], run.measured["peak_bytes"]) == (60.0, 5.0)
    assert run.difference["tokens_per_second"] == pytest.approx(-0.25)


def test_a_run_that_says_little_is_a_row_of_dashes() -> None:
    bare = RunRecord("id", "bare", "FAILED", 0, None, {}, {}, {})
    (run,) = compare([bare]).runs
    assert plan_text(run) == "not recorded"
    assert set(cells(run, "bare")) == {"bare", "not recorded", "failed", "-"}
    assert "bare" in shown(compare([bare]))


@pytest.mark.parametrize("width", [60, 80, 116, 200])
def test_no_number_is_lost_on_a_narrow_terminal(width: int) -> None:
    runs = [
        record(name, metrics={"measured.peak_bytes": 3.5 * 2**30}, settings={"cluster.gpu.price_per_hour": "1.5"})
        for name in ("a-name-of-many-words-1a2b3c4d", "another-name-of-many-words-5e6f7a8b")
    ]
    text = shown(compare(runs), width)
    for number in ("2.0000", "1.5000", "100", "+25%", "3.50 GiB", "16,666.67"):
        assert text.count(number) == 2, number


def test_nothing_but_text_breaks_no_page() -> None:
    odd = record("<script>alert(1)</script>$x_", settings={"data.path": "<b>"})
    html = page(compare([odd, record("b")]), {odd.run_id: [(1, 2.0), (2, float("nan"))]}, "a & b")
    assert "<script>" not in html
    assert "a &amp; b" in html
    assert "<svg" in html


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"data": 1}, "one process"),
        ({"tensor": 2}, "data 4 · tensor 2"),
        ({"zero_stage": 3, "zero_group": 4}, "data 4 · ZeRO 3"),
        ({"zero_stage": 2, "zero_group": 2}, "data 4 · ZeRO 2 of 2"),
        ({"data": 1, "pipeline": 2, "schedule": "gpipe"}, "pipeline 2 · gpipe"),
    ],
)
def test_a_plan_in_words(plan: dict[str, Any], words: str) -> None:
    assert plan_text(compare([record("a", plan=plan)]).runs[0]) == words


def test_a_run_that_was_replanned_says_so() -> None:
    (run,) = compare([record("a", tags={"changed.plan.data": "4 -> 2"})]).runs
    assert plan_text(run) == "data 4, re-planned on the way"


def test_what_was_measured_of_two_plans_is_held_against_neither() -> None:
    both = record("both", rate=900.0, tags={"changed.plan.data": "4 -> 2"}, metrics={"measured.peak_bytes": 5.0})
    found = compare([both, record("slow", metrics={"measured.peak_bytes": 7.0}), record("fast", rate=120.0)])
    (training,) = found.trainings
    assert training.fastest == "fast-id" and training.leanest is None
    (mixed,) = (run for run in found.runs if run.name == "both")
    assert mixed.measured["tokens_per_second"] == 900.0
    assert set(mixed.predicted.values()) == set(mixed.difference.values()) == {None}


def test_two_runs_of_one_name_are_told_apart() -> None:
    text = shown(compare([record("a", run_id="abcdef12"), record("a", run_id="fedcba98")]))
    assert "a (abcdef)" in text
    assert "a (fedcba)" in text


def test_validation_is_compared_over_trainings_of_one_text_alone() -> None:
    lower = {"validation_nats_per_byte": 1.0}
    wide = record("wide", settings={"model.hidden_size": "16"}, metrics=lower)
    assert compare([record("a"), wide]).lowest_validation == "wide-id"
    elsewhere = record("elsewhere", settings={"data.path": "other/"}, metrics=lower)
    assert compare([record("a"), elsewhere]).lowest_validation is None


def test_machines_get_plain_values() -> None:
    text = json.dumps(compare([record("a"), record("b", rate=None)]).to_dict(), allow_nan=False)
    assert json.loads(text)["schema_version"] == 1
