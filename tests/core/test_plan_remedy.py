"""Remedies for a plan that does not fit: each one named was tried and fits."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.schema import RunConfig
from orchestrator.plan.make import make_plan
from orchestrator.plan.remedy import changed
from tests.core import plan_cases as cases

_REMEDY = re.compile(r"((?:[a-z_.]+=[\w.]+ )+)\(([\d.,]+) GiB\)")


def _value(text: str) -> Any:
    return int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)


def _named(fix: str) -> list[tuple[dict[str, Any], float]]:
    """The changes that a fix names, with the GiB that it promises."""
    found = []
    for words, gib in _REMEDY.findall(fix):
        change = dict(word.split("=") for word in words.split())
        found.append(({key: _value(text) for key, text in change.items()}, float(gib.replace(",", ""))))
    return found


too_large = st.builds(
    cases.config,
    st.just(cases.LLAMA_7B),
    cluster=st.fixed_dictionaries(
        {"gpu": st.sampled_from([cases.A100_40GB, {**cases.A100_80GB, "memory_gib": 20.0}]), "nodes": st.just(2)}
    ),
    parallel=st.fixed_dictionaries(
        {"zero_stage": st.integers(0, 3), "tensor": st.sampled_from([1, 2]), "pipeline": st.sampled_from([1, 2])}
    ),
    training=st.fixed_dictionaries(
        {
            "micro_batch_size": st.sampled_from([1, 4]),
            "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
        }
    ),
)


@cases.examples(30)
@given(too_large)
def test_every_change_that_is_named_fits_with_the_bytes_it_promises(config: RunConfig) -> None:
    plan = make_plan(config)
    for problem in plan.problems:
        assert problem.key == "cluster.gpu.memory_gib"
        for change, promised in _named(problem.fix):
            mended = make_plan(changed(config, change))
            assert mended.feasible
            assert mended.memory is not None
            assert mended.memory.peak_bytes is not None
            assert mended.memory.peak_bytes / 2**30 == pytest.approx(promised, abs=0.06)


def test_a_full_copy_of_7b_in_mixed_precision_is_mended_by_sharding() -> None:
    problem = make_plan(cases.config(cases.LLAMA_7B)).problems[0]
    changes = [change for change, _ in _named(problem.fix)]
    assert {"parallel.zero_stage": 1} in changes
    assert "Use parallel.zero_stage=1" in problem.fix


def test_several_changes_are_named_together_when_no_single_one_is_enough() -> None:
    config = cases.config(
        cases.LLAMA_7B,
        cluster={"gpu": {**cases.A100_80GB, "memory_gib": 24.0}},
        training={"micro_batch_size": 8, "activation_checkpointing": "none"},
    )
    changes = [change for change, _ in _named(make_plan(config).problems[0].fix)]
    assert len(changes) == 1
    assert len(changes[0]) > 1


def test_a_hopeless_plan_says_that_no_single_change_helps() -> None:
    config = cases.config(cases.LLAMA2_70B, cluster={"nodes": 1, "gpus_per_node": 1}, parallel={"data": 1})
    assert "No single change makes it fit" in make_plan(config).problems[0].fix
