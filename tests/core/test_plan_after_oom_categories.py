"""Which category of memory is named when a rank ran out of it."""

from __future__ import annotations

import pytest

from orchestrator.plan.after_oom import worst_category

PLANNED = {"parameters": 1000, "optimizer": 2000, "activations": 7000}


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        ({"parameters": 1000, "optimizer": 2000, "activations": 9000}, "activations"),
        ({"parameters": 4000, "optimizer": 2500, "activations": 1000}, "parameters"),
        ({"parameters": 900, "optimizer": 1900, "activations": 7000}, None),
        # Step counters and the like: less than a hundredth of the plan explains nothing.
        ({"parameters": 1000, "optimizer": 2084, "activations": 1000}, None),
        ({"parameters": 1000, "unheard of": 3000}, "unheard of"),
        ({}, None),
    ],
)
def test_the_category_named_is_the_one_that_exceeded_the_plan_by_most(
    measured: dict[str, int], named: str | None
) -> None:
    assert worst_category(measured, PLANNED) == named
