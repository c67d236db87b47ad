"""A rank's whole life on real processes: training, stopping, resuming, validating, recording, failing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.folder import newest_complete
from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.gloo import RanksFailedError, TestLink, live

pytestmark = pytest.mark.torch


def run(
    directory: Path, *, attempt: int = 1, stop_at_step: dict[int, int] | None = None, **changes: Any
) -> list[TestLink]:
    return live(tasks_of(tiny_plan(**changes), directory, attempt=attempt), stop_at_step)


def record(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in record(directory)]


TWENTY = {
    "optimizer__lr": 1e-3,
    "training__steps": 20,
    "training__validate_every_steps": 10,
    "training__global_batch_size": 8,
}


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twenty steps under four plans that differ in ranks and micro-batches alone."""
    plans = {
        "one rank": {"parallel__data": 1, "training__micro_batch_size": 8},
        "one rank, accumulation": {"parallel__data": 1, "training__micro_batch_size": 2},
        "two ranks": {"parallel__data": 2, "training__micro_batch_size": 4},
        "two ranks, accumulation": {"parallel__data": 2, "training__micro_batch_size": 1},
    }
    found = {}
    for name, changes in plans.items():
        found[name] = tmp_path_factory.mktemp("run")
        run(found[name], **TWENTY, **changes)
    return found


def test_ranks_and_accumulation_change_nothing_that_is_learned(twenty_steps: dict[str, Path]) -> None:
    wanted = losses(twenty_steps["one rank"])
    assert len(wanted) == 20
    for name, directory in twenty_steps.items():
        assert losses(directory) == pytest.approx(wanted, abs=1e-5), name


def test_the_validation_loss_depends_on_neither_ranks_nor_accumulation(twenty_steps: dict[str, Path]) -> None:
    for directory in twenty_steps.values():
        validated = {line["step"]: line["validation_loss"] for line in record(directory) if "validation_loss" in line}
        wanted = {line["step"]: line["validation_loss"] for line in record(twenty_steps["one rank"])[9::10]}
        assert validated == pytest.approx(wanted, abs=1e-5)


def test_every_sample_of_a_step_is_on_exactly_one_data_rank_and_none_depends_on_their_number(
    twenty_steps: dict[str, Path],
) -> None:
    wanted = [line["samples"][0] for line in record(twenty_steps["one rank"])]
    for line, ids in zip(record(twenty_steps["two ranks, accumulation"]), wanted, strict=True):
        first, second = line["samples"]
        assert not set(first) & set(second)
        assert first + second == ids


def test_each_data_rank_trains_on_its_share_of_the_tokens(twenty_steps: dict[str, Path]) -> None:
    for line in record(twenty_steps["two ranks"]):
        assert line["tokens"] == 8 * 16
        assert line["tokens_per_data_rank"] == [64, 64]


RESUMABLE = {
    "parallel__data": 2,
    "training__steps": 6,
    "training__global_batch_size": 8,
    "training__micro_batch_size": 2,
    "checkpoint__every_steps": 2,
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TestLink]]:
    directory = tmp_path_factory.mktemp("unbroken")
    return directory, run(directory, **RESUMABLE)


def test_a_stopped_and_continued_run_equals_the_unbroken_one_bit_for_bit(
    tmp_path: Path, unbroken: tuple[Path, list[TestLink]]
) -> None:
    stopped = run(tmp_path, stop_at_step={1: 4}, **RESUMABLE)
    assert [link.done()["status"] for link in stopped] == ["stopped", "stopped"]
    assert [link.done()["step"] for link in stopped] == [3, 3]
    continued = run(tmp_path, attempt=2, **RESUMABLE)
    (resumed,) = (event for event in continued[0].events if event["kind"] == "resumed")
    assert resumed["step"] == 3
    assert [link.done()["status"] for link in continued] == ["finished", "finished"]
    assert losses(tmp_path) == losses(unbroken[0])
    assert [line["gradient_norm"] for line in record(tmp_path)] == [
        line["gradient_norm"] for line in record(unbroken[0])
    ]
    for name in ("final_loss", "validation_loss", "steps", "tokens"):
        assert continued[0].done()["result"][name] == unbroken[1][0].done()["result"][name]


def test_a_run_that_died_repeats_the_steps_since_its_checkpoint_and_records_each_once(
    tmp_path: Path, unbroken: tuple[Path, list[TestLink]]
) -> None:
    run(tmp_path, stop_at_step={0: 4}, **RESUMABLE)
    log = tmp_path / "metrics.jsonl"
    # As if the run had gone on to step 5 after its newest checkpoint (of step 3) and died there.
    lines = (unbroken[0] / "metrics.jsonl").read_text().splitlines()
    log.write_text("\n".join(lines[:5]) + "\n")
    run(tmp_path, attempt=2, **RESUMABLE)
    assert [line["step"] for line in record(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [line["attempt"] for line in record(tmp_path)] == [1, 1, 1, 2, 2, 2]
    assert losses(tmp_path) == losses(unbroken[0])


def test_dropout_is_drawn_alike_by_a_resumed_run(tmp_path: Path) -> None:
    dropped = {**RESUMABLE, "model__resid_pdrop": 0.2, "model__attention_dropout": 0.2}
    run(tmp_path / "unbroken", **dropped)
    run(tmp_path / "broken", stop_at_step={0: 4}, **dropped)
    run(tmp_path / "broken", attempt=2, **dropped)
    assert losses(tmp_path / "broken") == losses(tmp_path / "unbroken")


FOUR_LAYERS = {"model__num_hidden_layers": 4, "optimizer__lr": 1e-3}
STAGES = [
    ({"parallel__data": 2}, {"parallel__data": 1}),
    ({"parallel__data": 2, "parallel__zero_stage": 3}, {"parallel__data": 1, "training__micro_batch_size": 8}),
    ({"parallel__data": 1}, {"parallel__data": 2, "parallel__zero_stage": 2}),
    ({"parallel__data": 2, "parallel__zero_stage": 1}, {"parallel__data": 2, "parallel__zero_stage": 3}),
    ({"parallel__data": 1, "parallel__tensor": 2}, {"parallel__data": 2}),
    (
        {"parallel__data": 1, "parallel__pipeline": 2, "model__tie_word_embeddings": True},
        {"parallel__data": 2, "parallel__zero_stage": 3, "model__tie_word_embeddings": True},
    ),
    (
        {"parallel__data": 2, "parallel__zero_stage": 2, "model__tie_word_embeddings": True},
        {
            "parallel__data": 1,
            "parallel__pipeline": 2,
            "parallel__schedule": "zbv_zero_bubble",
            "parallel__virtual_stages": 2,
            "model__tie_word_embeddings": True,
        },
    ),
]


@pytest.mark.parametrize(("before", "after"), STAGES)
def test_a_checkpoint_goes_on_under_another_plan(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    same_model = {key: value for key, value in before.items() if key.startswith("model__")}
    unbroken = tmp_path / "unbroken"
    run(unbroken, **(RESUMABLE | FOUR_LAYERS | same_model))
    directory = tmp_path / "broken"
    run(directory, stop_at_step={0: 4}, **(RESUMABLE | FOUR_LAYERS | before))
    run(directory, attempt=2, **(RESUMABLE | FOUR_LAYERS | after))
    assert losses(directory) == pytest.approx(losses(unbroken), abs=2e-5)
    last, wanted = record(directory)[-1], record(unbroken)[-1]
    assert last["validation_loss"] == pytest.approx(wanted["validation_loss"], abs=2e-5)
    assert last["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-4)


def test_a_run_can_start_from_the_weights_of_another(tmp_path: Path, unbroken: tuple[Path, list[TestLink]]) -> None:
    start = unbroken[0] / "checkpoints" / "step-00000006"
    hardly = {"training__steps": 1, "optimizer__lr": 1e-12, "training__seed": 5}
    begun = run(tmp_path, **(RESUMABLE | hardly), checkpoint__init_from=str(start), data__source="synthetic")
    assert [line["step"] for line in record(tmp_path)] == [1]
    fresh = run(tmp_path / "fresh", **(RESUMABLE | hardly))
    trained = begun[0].done()["result"]["validation_loss"]
    assert trained < fresh[0].done()["result"]["validation_loss"] - 0.1


def test_fp16_resumes_with_its_loss_scale(tmp_path: Path) -> None:
    halves = {**RESUMABLE, "training__precision": "fp16_mixed"}
    run(tmp_path / "unbroken", **halves)
    run(tmp_path / "broken", stop_at_step={0: 4}, **halves)
    run(tmp_path / "broken", attempt=2, **halves)
    assert losses(tmp_path / "broken") == losses(tmp_path / "unbroken")
    assert all(line["loss_scale"] == 2.0**16 for line in record(tmp_path / "broken"))


def test_a_changed_learning_rate_takes_effect_on_resuming(tmp_path: Path) -> None:
    run(tmp_path, stop_at_step={0: 4}, **RESUMABLE)
    changed = {**RESUMABLE, "optimizer__lr": 2e-2}
    run(tmp_path, attempt=2, **changed)
    rates = [line["learning_rate"] for line in record(tmp_path)]
    fresh = tiny_plan(**RESUMABLE).config.optimizer
    assert rates[5] == pytest.approx(2e-2 * fresh.schedule.minimum_ratio)


def test_a_run_with_no_step_left_to_do_still_says_how_it_ended(unbroken: tuple[Path, list[TestLink]]) -> None:
    directory, links = unbroken
    again = run(directory, attempt=2, **RESUMABLE)[0].done()
    first = links[0].done()
    assert again["status"] == "finished"
    for name in ("final_loss", "validation_loss", "steps"):
        assert again["result"][name] == first["result"][name]


def test_the_result_says_what_the_summary_needs(unbroken: tuple[Path, list[TestLink]]) -> None:
    directory, links = unbroken
    for link in links:
        result = link.done()["result"]
        assert result["steps"] == 6
        assert result["tokens"] == 6 * 8 * 16
        assert result["final_loss"] == record(directory)[-1]["loss"]
        assert result["peak_memory_bytes"] > 50 * 2**20
        assert result["tokens_per_second"] > 0
        assert result["seconds_to_first_step"] > 0
        assert result["mfu"] is None
        assert result["attention_kernel"] == "flash_cpu"
        assert Path(result["checkpoint"]).name == "step-00000006"
        assert {"process_group", "build", "data", "load", "first_step"} <= set(result["timings_seconds"])


def test_a_rank_says_what_it_does_in_order(unbroken: tuple[Path, list[TestLink]]) -> None:
    for link in unbroken[1]:
        phases = [phase for phase, _ in itertools.groupby(link.beats, key=lambda beat: beat[0])]
        assert phases[:6] == ["starting", "rendezvous", "building", "loading", "reading", "stepping"]
        assert phases[-1] == "finishing"
        assert {step for phase, step in link.beats if phase == "stepping"} == set(range(1, 7))


def test_only_the_newest_checkpoints_are_kept(unbroken: tuple[Path, list[TestLink]]) -> None:
    folder = unbroken[0] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]
    newest = newest_complete(folder)
    assert newest is not None
    assert newest.manifest.tokens == 6 * 8 * 16


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path, unbroken: tuple[Path, list[TestLink]]) -> None:
    checkpoint = unbroken[0] / "checkpoints" / "step-00000006"
    with pytest.raises(RanksFailedError, match="trained on data with fingerprint"):
        run(tmp_path, **{**RESUMABLE, "training__seed": 1}, checkpoint__resume=str(checkpoint))


def test_a_named_checkpoint_that_is_not_there_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"checkpoint\.resume.*is not a complete checkpoint"):
        run(tmp_path, **RESUMABLE, checkpoint__resume=str(tmp_path / "nowhere"))


DIVERGING = {"optimizer__name": "sgd", "optimizer__lr": 1e30, "optimizer__schedule": {"name": "constant"}}


def test_a_step_that_is_not_finite_ends_the_run_on_every_rank_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="NotFiniteError") as caught:
        run(tmp_path, parallel__data=2, training__gradient_clip=None, **DIVERGING)
    assert set(caught.value.failures) == {0, 1}
    assert "Lower optimizer.lr" in caught.value.failures[0]


def test_a_step_that_is_not_finite_can_be_skipped_and_leaves_weights_as_they_were(tmp_path: Path) -> None:
    run(tmp_path, parallel__data=2, training__gradient_clip=None, fault_tolerance__on_nan="skip", **DIVERGING)
    lines = record(tmp_path)
    assert len(lines) == 5
    assert all(line.get("skipped") for line in lines[1:])


def test_a_failure_of_one_rank_ends_the_others_too(tmp_path: Path) -> None:
    tasks = tasks_of(tiny_plan(parallel__data=2), tmp_path)
    broken = tasks[1].plan.config.model_copy(
        update={"data": tasks[1].plan.config.data.model_copy(update={"source": "text", "path": "/nowhere"})}
    )
    tasks[1] = replace(tasks[1], plan=replace(tasks[1].plan, config=broken))
    with pytest.raises(RanksFailedError) as caught:
        live(tasks)
    assert set(caught.value.failures) == {0, 1}
    assert "/nowhere" in caught.value.failures[1]
