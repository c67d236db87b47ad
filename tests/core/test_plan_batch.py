"""Batch arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan import batch
from orchestrator.plan.make import make_plan
from tests.core import plan_cases as cases


@cases.examples(60)
@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 64))
def test_micro_batches_come_out_whole_or_not_at_all(whole: int, micro: int, data: int) -> None:
    count = batch.micro_batches(whole, micro, data)
    assert (count is None) == (whole % (micro * data) != 0)
    assert count is None or count * micro * data == whole


@cases.examples(60)
@given(st.integers(1, 20000))
def test_divisors_are_all_divisors(number: int) -> None:
    assert batch.divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


@pytest.mark.parametrize(
    ("value", "unit", "expected"), [(63, 8, (56, 64)), (5, 8, (8,)), (64, 8, (64, 72)), (1, 1, (1, 2))]
)
def test_nearest_multiples(value: int, unit: int, expected: tuple[int, ...]) -> None:
    assert batch.nearest_multiples(value, unit) == expected


def test_nearest_takes_the_closest_on_either_side() -> None:
    assert batch.nearest(3, batch.divisors(32)) == (2, 4)
    assert batch.nearest(100, [1, 2, 4]) == (4,)
    assert batch.nearest(4, [1, 2, 4]) == (4,)


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (8192, 1), (8193, 2), (81920, 10)])
def test_tokens_round_up_to_whole_steps(tokens: int, steps: int) -> None:
    training = cases.config(training={"steps": None, "tokens": tokens}).training
    assert batch.tokens_per_step(training) == 64 * 128
    assert batch.steps_of(training) == steps
    assert batch.tokens_of(training) == steps * 8192


def test_micro_batches_of_the_plan_follow_from_batch_and_data() -> None:
    plan = make_plan(cases.config(training={"micro_batch_size": 2}))
    assert plan.parallel is not None
    assert plan.parallel.data == 8
    assert plan.parallel.micro_batches == 4
