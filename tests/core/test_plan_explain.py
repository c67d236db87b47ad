"""The page for people: the verdict, the tables, narrow and wide terminals."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator.config.compose import load_config
from orchestrator.config.schema import RunConfig
from orchestrator.plan.explain import count, cut_words, duration, render, size
from orchestrator.plan.explain_ranks import number_ranges
from orchestrator.plan.explain_search import render_search, search_dict
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.search import search
from orchestrator.plan.stages import as_ranges
from tests.core import plan_cases as cases


def _page(plan: RunPlan, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    render(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _found(config: RunConfig, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    render_search(config, search(config), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_page_says_when_the_loss_is_computed_in_chunks() -> None:
    def said(sequence: int) -> bool:
        longer = {**cases.LLAMA_7B, "max_position_embeddings": 16384}
        training = {"sequence_length": sequence, "activation_checkpointing": "full"}
        return "the loss takes the logits of 2,048 tokens at a time, of the" in _page(
            make_plan(cases.config(longer, parallel={"data": 8, "zero_stage": 3}, training=training))
        )

    assert said(16384)
    assert not said(4096)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (1536, "1.50 KiB"), (79.2 * 2**30, "79.20 GiB"), (3 * 2**40, "3.00 TiB")],
)
def test_sizes(value: float | None, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1234.5, "1,234 s"), (12.345, "12.35 s"), (0.0123, "12.3 ms"), (0.0000123, "12.3 us")],
)
def test_durations(value: float | None, text: str) -> None:
    assert duration(value) == text


def test_counts_and_cuts() -> None:
    assert count(6_738_415_616) == "6.738 billion"
    assert count(123) == "123"
    assert cut_words(as_ranges((7, *[8] * 14, 7))) == "7 + 14 x 8 + 7 = 126"


def test_a_plan_that_fits_says_so_with_the_margin_first() -> None:
    page = _page(make_plan(load_config(["+experiment=llama7b_zero2"])))
    first = page.splitlines()[0]
    assert first.startswith("llama7b_zero2: fits - ")
    assert "of 79.20 GiB a GPU" in first
    assert "to spare" in first
    for section in ("Memory of one GPU", "Time of one step", "Traffic of one GPU and step", "Whole training", "Ranks"):
        assert section in page
    assert "data 8 x tensor 1 x pipeline 1 = 8 ranks; ZeRO-2 over 8" in page


def test_a_plan_that_does_not_fit_says_so_first_and_keeps_its_memory_table() -> None:
    page = _page(make_plan(cases.config(cases.LLAMA2_70B)))
    assert "does not fit" in page.splitlines()[0]
    assert "the GPU holds" in page
    assert "1. cluster.gpu.memory_gib:" in page


def test_problems_are_numbered_with_their_remedies() -> None:
    page = _page(make_plan(cases.config(training={"global_batch_size": 63}, parallel={"zero_group": 2})))
    assert "refused - 2 problems" in page.splitlines()[0]
    assert "1. parallel.zero_group" in page
    assert "2. training.global_batch_size" in page
    assert "Use training.global_batch_size=56 or 64" in page


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("experiment", ["llama7b_zero2", "llama70b_3d", "llama3_405b", "quickstart"])
def test_no_line_is_longer_than_the_terminal(experiment: str, width: int) -> None:
    page = _page(make_plan(load_config([f"+experiment={experiment}"])), width)
    assert max(len(line) for line in page.splitlines()) <= width
    assert "…" not in page


def test_a_large_world_shows_both_ends_of_its_rank_table() -> None:
    page = _page(make_plan(load_config(["+experiment=llama3_405b"])), 120)
    rows = page[page.index("Ranks") :].splitlines()
    assert len(rows) < 25
    assert any("16376-16383" in row for row in rows)
    (left_out,) = [row for row in page.splitlines() if "not shown" in row]
    assert "pipeline 3-14:" in left_out


def test_a_plan_for_processes_of_a_cpu_does_not_speak_of_gpus() -> None:
    page = _page(make_plan(load_config([])))
    assert "GPU" not in page
    assert "in 2 calls" in page
    assert "in 1 call " in _page(make_plan(load_config(["cluster.gpus_per_node=4", "parallel.tensor=2"])))
    assert "= 1 rank;" in _page(make_plan(load_config(["cluster.gpus_per_node=1"])))


@pytest.mark.parametrize(
    ("values", "text"), [([3], "3"), ([0, 1, 2], "0-2"), ([4, 0, 2, 3], "0, 2-4"), ([1, 1], "1"), ([], "")]
)
def test_numbers_as_ranges(values: list[int], text: str) -> None:
    assert number_ranges(values) == text


@pytest.mark.parametrize("width", [80, 120])
def test_a_search_shows_the_best_plans_what_to_type_and_why_others_are_none(width: int) -> None:
    config = cases.config(cases.LLAMA_7B, training={"global_batch_size": 64})
    page = _found(config, width)
    assert max(len(line) for line in page.splitlines()) <= width
    assert "plans fit on 1 node x 8 = 8 GPUs (A100-80GB)" in page
    assert "The best, to be typed" in page
    assert "parallel.data=8" in page
    assert "Largest micro-batch that fits with it:" in page
    assert "The declared plan" in page
    assert "pipeline rank 0 needs" in page


def test_a_search_recommends_what_trains_and_marks_what_is_only_planned() -> None:
    config = load_config(["+experiment=llama70b_3d"])
    found = search(config)
    page = _found(config, 120)
    trains = [plan.candidate.split.context == 1 for plan in found.ranked]
    assert not trains[0]
    assert f"The best that trains, number {trains.index(True) + 1}, to be typed" in page
    assert "parallel.context" not in page
    assert "* 1 " in page
    assert "is refused by `train`" in page
    assert [plan["trains"] for plan in search_dict(config, found)["plans"]] == trains


def test_a_search_as_json_has_every_plan_and_every_reason() -> None:
    config = cases.config(cases.LLAMA_7B, training={"global_batch_size": 64})
    found = search(config)
    values: dict[str, Any] = search_dict(config, found)
    assert len(values["plans"]) == len(found.ranked)
    assert len(values["rejected"]) == len(found.rejected)
    assert all(plan["peak_bytes"] <= values["capacity_bytes"] for plan in values["plans"])
    best = values["plans"][0]
    plan = make_plan(RunConfig.model_validate(config.to_dict() | {"parallel": {"strategy": "auto"}}))
    assert plan.time.step_seconds == pytest.approx(best["step_seconds"])
