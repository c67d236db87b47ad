"""`verify` can fail: it sees each planted mistake in a reduction of an ordinary plan, and nothing without one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from orchestrator.engine.verify import reference_trace
from orchestrator.engine.verify_case import Case, cases_of
from orchestrator.engine.verify_compare import Outcome, compare, initial_weights
from orchestrator.engine.verify_processes import run_on_ranks
from orchestrator.engine.verify_rank import RankTrace, run_cases
from orchestrator.plan.reduce import reductions
from tests.engine import faults
from tests.engine.cases import tiny_plan
from tests.engine.faults import Plant

pytestmark = pytest.mark.torch

PLANS: dict[str, dict[str, Any]] = {
    "data": {"parallel__data": 2, "training__micro_batch_size": 1},
    "ZeRO-2": {"parallel__data": 2, "parallel__zero_stage": 2, "training__micro_batch_size": 1},
    "ZeRO-3": {"parallel__data": 2, "parallel__zero_stage": 3, "training__micro_batch_size": 1},
    "tensor": {"parallel__tensor": 2},
    "pipeline, tied": {
        "parallel__pipeline": 2,
        "model__num_hidden_layers": 4,
        "model__tie_word_embeddings": True,
        "training__micro_batch_size": 1,
    },
}
PLANTED: list[tuple[Plant, str, str]] = [
    # mistake, plan, what must differ
    (faults.gradient_divided_by_accumulation, "data", "gradient"),
    (faults.norm_of_this_rank_alone, "pipeline, tied", "gradient norm"),
    (faults.norm_of_this_rank_alone, "ZeRO-3", "gradient norm"),
    (faults.tied_gradients_not_summed, "pipeline, tied", "gradient"),
    (faults.replicated_weights_counted_by_every_tensor_rank, "tensor", "gradient norm"),
    (faults.stale_weights_after_the_step, "ZeRO-2", "loss"),
    (faults.mask_ignored_in_the_token_count, "data", "loss"),
    (faults.mean_of_means_over_ranks, "data", "loss"),
    (faults.data_ranks_read_the_same_samples, "data", "loss"),
    (faults.rotary_positions_from_the_local_part, "tensor", "loss"),
    (faults.gradients_reduced_after_the_last_micro_batch_only_lose_the_others, "ZeRO-3", "gradient"),
    (faults.initial_weights_of_the_rank, "ZeRO-3", ""),
]
WORK: list[tuple[Plant | None, str]] = [
    *((plant, plan) for plant, plan, _ in PLANTED),
    *((None, plan) for plan in PLANS),
]


def exact_case(plan: str) -> Case:
    (reduction,) = reductions(tiny_plan(training__gradient_clip=1.0, **PLANS[plan]))
    return cases_of(reduction)[0]


def on_rank(work: list[tuple[Plant | None, str]], *, beat: Any) -> list[RankTrace]:
    """Every case with its mistake made; the mistakes change numbers, never which collectives meet."""
    return [run_cases([exact_case(plan)], beat, plant or nullcontext)[0] for plant, plan in work]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    by_rank = run_on_ranks(2, on_rank, WORK)
    wanted = {}
    for plan in PLANS:
        initial = initial_weights(exact_case(plan))
        wanted[plan] = (initial, reference_trace(exact_case(plan), initial))
    return [
        compare(exact_case(plan), [rank[index] for rank in by_rank], *wanted[plan])
        for index, (_, plan) in enumerate(WORK)
    ]


@pytest.mark.parametrize("index", range(len(PLANTED)), ids=[f"{fault.__name__} under {on}" for fault, on, _ in PLANTED])
def test_a_planted_mistake_is_seen_where_it_must_show(index: int, outcomes: list[Outcome]) -> None:
    what, outcome = PLANTED[index][2], outcomes[index]
    assert not outcome.agrees
    differing = {difference.what for difference in outcome.differences if not difference.agrees}
    assert what in differing if what else outcome.broken


@pytest.mark.parametrize("index", range(len(PLANTED), len(WORK)), ids=list(PLANS))
def test_the_same_plan_without_a_mistake_agrees(index: int, outcomes: list[Outcome]) -> None:
    assert outcomes[index].agrees, outcomes[index]
    assert outcomes[index].clipped
    assert outcomes[index].empty == WORK[index][1].startswith(("data", "ZeRO"))


def test_samples_that_two_data_ranks_read_are_named(outcomes: list[Outcome]) -> None:
    (index,) = (i for i, (fault, *_) in enumerate(PLANTED) if fault is faults.data_ranks_read_the_same_samples)
    assert any("on exactly one data rank" in text for text in outcomes[index].broken)
