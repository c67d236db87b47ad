"""What the planner lets through runs and agrees: plans from the corners of what may be declared, in FP64."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from orchestrator.engine.verify_case import EXACT, Case
from orchestrator.plan.engine_rules import engine_problems
from tests.engine.cases import tiny_plan
from tests.engine.sample_corners import judge

pytestmark = pytest.mark.torch

NARROW = {"model__hidden_size": 8, "model__intermediate_size": 4, "model__num_attention_heads": 4}
TIED = {"model__tie_word_embeddings": True}


def staged(ranks: int, schedule: str, virtual: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "parallel__pipeline": ranks,
        "parallel__schedule": schedule,
        "parallel__virtual_stages": virtual,
        "model__num_hidden_layers": max(2, ranks * virtual),
        "training__micro_batch_size": 1,
        **changes,
    }


CORNERS: dict[str, dict[str, Any]] = {
    "a vocabulary of fewer rows than tensor ranks times two": {
        "parallel__tensor": 2, "model__vocab_size": 3, **TIED,
    },
    "fewer rows of the vocabulary than ranks, ZeRO-3": {
        "parallel__data": 4, "parallel__zero_stage": 3, "model__vocab_size": 3,
    },
    "fewer rows of every matrix than ranks, ZeRO-3": {
        "parallel__data": 4, "parallel__zero_stage": 3, "model__hidden_size": 2, "model__intermediate_size": 1,
        "model__num_attention_heads": 1, "model__num_key_value_heads": 1, "model__head_dim": 2,
    },
    "fewer rows of the vocabulary than tensor ranks": {
        "parallel__tensor": 4, "model__vocab_size": 3, "model__num_key_value_heads": 4,
    },
    "one row of the vocabulary on some tensor ranks, none on the last": {
        "parallel__tensor": 4, "model__vocab_size": 5, "model__num_key_value_heads": 4, **TIED,
    },
    "one token on each tensor rank": {
        "parallel__tensor": 2, "parallel__sequence_parallel": True, "training__sequence_length": 2,
    },
    "sequences of one token": {"parallel__data": 2, "training__sequence_length": 1, "model__sliding_window": 1},
    "gpt, sequences of one token, tensor": {
        "parallel__tensor": 2, "training__sequence_length": 1, "model__family": "gpt",
        "model__num_key_value_heads": None,
    },
    "one sequence in all": staged(2, "gpipe", training__global_batch_size=1),
    "groups of one rank": {"parallel__data": 2, "parallel__zero_stage": 3, "parallel__zero_group": 1},
    "groups of one rank in a pipeline": staged(
        2, "1f1b", parallel__data=2, parallel__zero_stage=2, parallel__zero_group=1
    ),
    "offload of full copies, tensor": {"parallel__tensor": 2, "parallel__offload": "all"},
    "offload of full copies, data": {"parallel__data": 2, "parallel__offload": "all", "training__micro_batch_size": 1},
    "offload, split backward": staged(2, "zbv_zero_bubble", 2, parallel__offload="all", **TIED),
    "offload, hybrid groups": {
        "parallel__data": 4, "parallel__zero_stage": 2, "parallel__zero_group": 2, "parallel__offload": "all",
    },
    "fewer micro-batches than stages, gpipe": staged(4, "gpipe", training__global_batch_size=2),
    "fewer micro-batches than ranks, interleaved": staged(2, "interleaved_1f1b", 2, training__global_batch_size=1),
    "fewer micro-batches than ranks, zero bubble": staged(
        2, "interleaved_zero_bubble", 2, training__global_batch_size=1
    ),
    "zero bubble with one stage a rank": staged(2, "interleaved_zero_bubble", 1),
    "three stages a rank": staged(2, "interleaved_1f1b", 3, **TIED),
    "one micro-batch in a V": staged(2, "zbv_zero_bubble", 2, training__global_batch_size=1),
    "three micro-batches in a V": staged(2, "zbv_zero_bubble", 2, training__global_batch_size=3),
    "odd micro-batches, interleaved": staged(2, "interleaved_1f1b", 2, training__global_batch_size=3),
    "odd micro-batches, dualpipev": staged(2, "dualpipev", 2, training__global_batch_size=5),
    "sequence parallel without tensor ranks": {"parallel__data": 2, "parallel__sequence_parallel": True},
    "a schedule without a pipeline": {"parallel__data": 2, "parallel__schedule": "dualpipev"},
    "three data ranks": {
        "parallel__data": 3, "parallel__zero_stage": 3, "training__global_batch_size": 9,
        "training__micro_batch_size": 3,
    },
    "heads of another width, biases but the last, tensor": {
        "parallel__tensor": 2, "model__head_dim": 6, "model__attention_bias": True,
        "model__attention_output_bias": False,
    },
    "biases, sequence parallel, ZeRO-2": {
        "parallel__tensor": 2, "parallel__data": 2, "parallel__zero_stage": 2, "parallel__sequence_parallel": True,
        "model__attention_bias": True, "training__activation_checkpointing": "full",
    },
    "sgd with momentum, pipeline, ZeRO-3": staged(
        2, "1f1b", parallel__data=2, parallel__zero_stage=3, optimizer__name="sgd", optimizer__momentum=0.9
    ),
    "one optimizer step": {"parallel__data": 2, "training__steps": 1},
    "tied V with tensor ranks": staged(2, "dualpipev", 2, parallel__tensor=2, **TIED),
    "window, tensor, sequence parallel": {
        "parallel__tensor": 2, "parallel__sequence_parallel": True, "model__sliding_window": 3,
    },
    "narrow, ZeRO-2 over four, tied": {**NARROW, "parallel__data": 4, "parallel__zero_stage": 2, **TIED},
}  # fmt: skip


def corner(name: str) -> Case:
    changes = {"training__gradient_clip": 0.05, "training__steps": 3, "optimizer__eps": 1e-6, **CORNERS[name]}
    plan = tiny_plan(**changes)
    assert not engine_problems(plan)
    return Case(name, plan, True, EXACT)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """By corner of this test run, what is wrong with it."""
    chosen = [item.callspec.params["name"] for item in request.session.items if _is_corner(item)]
    by_world: dict[int, list[Case]] = defaultdict(list)
    for name in chosen:
        by_world[len(corner(name).plan.ranks)].append(corner(name))
    return {case.title: verdict for work in by_world.values() for case, verdict in zip(work, judge(work), strict=True)}


def _is_corner(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == test_a_corner_of_the_plan_space_runs_and_agrees.__name__


FAST = {
    "a vocabulary of fewer rows than tensor ranks times two", "one token on each tensor rank", "groups of one rank",
    "offload of full copies, tensor", "one sequence in all", "fewer micro-batches than ranks, interleaved",
    "sequence parallel without tensor ranks", "three micro-batches in a V",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CORNERS]
)
def test_a_corner_of_the_plan_space_runs_and_agrees(name: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[name] is None
