"""Memory under the schedules that split their backward passes: what waits between the two halves, and where."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.plan import split_moments
from orchestrator.plan.activations import block_activations
from orchestrator.plan.facts import derive
from orchestrator.plan.make import parallel_facts
from orchestrator.plan.memory import rank_memories
from orchestrator.plan.profiles import OURS
from orchestrator.plan.run_plan import RankMemory
from orchestrator.plan.schedules import Shape
from orchestrator.plan.split_moments import moments
from orchestrator.plan.work import work_of
from tests.core import plan_cases as cases

EIGHT_BLOCKS = {**cases.LLAMA_7B, "num_hidden_layers": 8}
STREAM = 4096 * 4096 * 2
"""Bytes of the residual stream of a micro-batch of 4096 tokens."""
BLOCK = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
HEAD = 32000 * 4096


def memory(schedule: str, micro_batches: int = 8, **training: Any) -> tuple[RankMemory, ...]:
    config = cases.config(
        EIGHT_BLOCKS,
        parallel={"data": 4, "pipeline": 2, "zero_stage": 1, "schedule": schedule, "virtual_stages": 2},
        training={
            "global_batch_size": 4 * micro_batches,
            "micro_batch_size": 1,
            "activation_checkpointing": "none",
            **training,
        },
    )
    return rank_memories(config, parallel_facts(derive(config)), OURS)


@pytest.mark.parametrize("schedule, virtual", [
    ("interleaved_zero_bubble", 1), ("interleaved_zero_bubble", 3), ("zbv_zero_bubble", 2), ("dualpipev", 2),
])  # fmt: skip
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_a_long_step_holds_what_its_first_and_last_rounds_tell(
    schedule: str, virtual: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(schedule, pipeline, virtual, 8 * pipeline)
    told = [set(moments(shape, rank, gradients_wait=True)) for rank in range(pipeline)]
    monkeypatch.setattr(split_moments, "_ROUNDS", 8)
    assert told == [set(moments(shape, rank, gradients_wait=True)) for rank in range(pipeline)]


def test_a_first_stage_keeps_everything_until_its_weights_turn() -> None:
    """It has no input whose gradient another stage waits for: torch computes all of it where the list has `W`."""
    for rank in range(2):
        for moment in moments(Shape("zbv_zero_bubble", 2, 2, 8), rank, gradients_wait=True):
            weights_only = moment.held[2:4]
            assert rank or weights_only[0] == 0
            assert not (rank == 0 and moment.at == 0 and moment.doing in ("I", "W"))


def test_gradients_of_weights_wait_for_the_next_backward_pass_of_their_stage() -> None:
    """Rank 1 of a V is at a backward pass for inputs when it holds most: of its two stages' gradients, which wait, all
    but one block's of the stage at work have been added up. Beside them are the buffers that it receives in."""
    received = 2 * 8 * STREAM
    tables = 2 * 2 * 4096 * 64 * 4
    assert memory("zbv_zero_bubble")[1].buffers_bytes == received + tables + 3 * BLOCK * 2


def test_gradients_that_are_as_wide_as_their_sums_wait_for_nothing() -> None:
    """In FP32: at most a product's gradient is there beside the sums."""
    largest = 4096 * 11008 * 4
    received, tables = 2 * 8 * STREAM * 2, 2 * 2 * 4096 * 64 * 4
    assert (memory("zbv_zero_bubble", precision="fp32")[1].buffers_bytes or 0) <= received + tables + largest


def test_each_micro_batch_that_waits_on_the_last_stage_keeps_a_gradient_of_the_heads_weight() -> None:
    """Interleaved zero bubble puts one off on two ranks; the V-shaped schedules take it at once."""
    assert memory("interleaved_zero_bubble")[1].logits_bytes == 2 * HEAD * 2
    assert memory("zbv_zero_bubble")[0].logits_bytes == HEAD * 2


def test_what_a_rank_sends_and_hands_to_itself_lives_to_the_steps_end() -> None:
    """In the point of a V: for each micro-batch more an output and an input's gradient that are sent, and two that are
    handed over."""
    short, long = (memory("zbv_zero_bubble", count)[1].activations_bytes or 0 for count in (8, 12))
    assert long - short == 4 * (2 + 2) * STREAM


@pytest.mark.parametrize("sequence_length", [4096, 2048])
def test_between_its_halves_a_backward_pass_keeps_gradients_of_products_and_norms(sequence_length: int) -> None:
    """Results of five products and two norms are as wide as the stream, those of two products as the feed-forward
    layer."""
    config = cases.config(
        EIGHT_BLOCKS, training={"sequence_length": sequence_length, "activation_checkpointing": "none"}
    )
    block = block_activations(work_of(config, parallel_facts(derive(config))), OURS)
    micro_batch = config.training.micro_batch_size
    assert block.deferred == micro_batch * sequence_length * 2 * (7 * 4096 + 2 * 11008)
