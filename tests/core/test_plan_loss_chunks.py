"""How the loss is computed, decided before anything runs: chunks of tokens, and when gradients are computed."""

from __future__ import annotations

import pytest

from orchestrator.plan.loss_chunks import (
    CHUNK_TOKENS,
    chunk_of,
    gradient_ahead,
    row_bytes,
)
from orchestrator.plan.schedules import Shape, action_lists


@pytest.mark.parametrize("tokens", [1, 100, 2048, 4096, 5000, 8192, 16384, 10**6])
@pytest.mark.parametrize("hidden", [64, 4096, 16384])
@pytest.mark.parametrize("element", [2, 4])
def test_a_micro_batch_is_cut_into_equal_chunks_only_where_that_needs_less_memory(
    tokens: int, hidden: int, element: int
) -> None:
    chunk = chunk_of(tokens, hidden, element)
    assert row_bytes(chunk, tokens, hidden, element) <= row_bytes(tokens, tokens, hidden, element)
    if chunk < tokens:
        assert CHUNK_TOKENS <= chunk < 2 * CHUNK_TOKENS
    assert -(-tokens // chunk) * chunk - tokens < -(-tokens // chunk)


@pytest.mark.parametrize(
    ("tokens", "hidden", "element", "chunk"),
    [
        (4096, 4096, 2, 4096),
        (8192, 4096, 2, 2048),
        (16384, 4096, 2, 2048),
        # The sum over chunks is as large as the logits that it saves.
        (8192, 16384, 2, 8192),
        # FP32 adds up in place.
        (4096, 4096, 4, 2048),
        (2048, 4096, 4, 2048),
    ],
)
def test_chunks_by_tokens_width_and_type(tokens: int, hidden: int, element: int, chunk: int) -> None:
    assert chunk_of(tokens, hidden, element) == chunk


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("interleaved_zero_bubble", 2),
        ("zbv_zero_bubble", 2),
        ("dualpipev", 2),
    ],
)
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 8), (4, 8), (4, 16)])
def test_gradients_are_computed_ahead_where_the_schedule_has_one_micro_batch_wait_on_the_last_stage(
    schedule: str, virtual: int, pipeline: int, micro_batches: int
) -> None:
    last, waiting, most = pipeline * virtual - 1, 0, 0
    for actions in action_lists(Shape(schedule, pipeline, virtual, micro_batches)):
        for action in actions:
            if action.stage == last:
                waiting += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
                most = max(most, waiting)
    assert gradient_ahead(schedule, pipeline) == (most == 1)
