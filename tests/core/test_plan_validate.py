"""Every rule: what is refused, under which key, with which numbers and which nearest values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.make import make_plan
from tests.core import plan_cases as cases
from tests.core.plan_refusals import REFUSALS, Refusal


@pytest.mark.parametrize("case", REFUSALS, ids=[case.name for case in REFUSALS])
def test_refuses(case: Refusal) -> None:
    plan = make_plan(
        cases.config(
            model_changes=case.model,
            cluster=case.cluster,
            parallel=case.parallel,
            training=case.training,
            optimizer=case.optimizer,
        )
    )
    assert [problem.key for problem in plan.problems] == [case.key]
    problem = plan.problems[0]
    for part in case.says:
        assert part in problem.message
    for part in case.fix:
        assert part in problem.fix


def test_the_fix_for_a_batch_that_does_not_divide_is_accepted() -> None:
    for size in (56, 64):
        assert make_plan(cases.config(training={"global_batch_size": size})).feasible
    assert make_plan(cases.config(training={"global_batch_size": 63}, parallel={"data": 7})).feasible


def test_all_problems_are_found_at_once_and_each_once() -> None:
    plan = make_plan(
        cases.config(
            model_changes={"intermediate_size": 190, "num_key_value_heads": 3},
            cluster={"gpu": cases.V100_32GB},
            parallel={"tensor": 4, "pipeline": 9, "data": 5, "zero_group": 2, "virtual_stages": 2},
            training={"sequence_length": 1000, "steps": None},
            optimizer={"momentum": 0.5},
        )
    )
    keys = [problem.key for problem in plan.problems]
    assert sorted(set(keys)) == sorted(
        {
            "model.num_key_value_heads",
            "training.sequence_length",
            "training.precision",
            "optimizer.momentum",
            "parallel.tensor",
            "cluster.nodes",
            "parallel.zero_group",
            "parallel.pipeline",
            "parallel.virtual_stages",
            "training.steps",
        }
    )
    assert len({problem.message for problem in plan.problems}) == len(plan.problems)


WARNINGS = (
    ("uneven vocabulary", {"model": {"vocab_size": 255}, "parallel": {"tensor": 4}}, "padded to 256"),
    ("idle GPUs", {"parallel": {"data": 4}}, "4 of 8 GPUs"),
    ("sequence parallel without tensor", {"parallel": {"sequence_parallel": True}}, "no effect"),
    ("sharding over one rank", {"parallel": {"zero_stage": 2, "zero_group": 1}}, "keeps full copies"),
    (
        "offload on a CPU",
        {
            "parallel": {"zero_stage": 3, "offload": "all"},
            "cluster": {"device": "cpu", "gpu": {"name": "cpu", "memory_gib": 8}},
        },
        "in host memory already",
    ),
    (
        "pure BF16 at a small rate",
        {"training": {"precision": "bf16_pure"}, "optimizer": {"lr": 2e-5}},
        "rounded away",
    ),
    ("warm-up longer than the run", {"optimizer": {"schedule": {"warmup_steps": 200}}}, "never reaches"),
    (
        "unlike GPUs",
        {
            "cluster": {
                "node_groups": [
                    {"nodes": 1, "gpus_per_node": 4, "gpu": cases.A100_80GB},
                    {"nodes": 1, "gpus_per_node": 4, "gpu": cases.A100_40GB},
                ]
            }
        },
        "weakest (39.4 GiB)",
    ),
)


@pytest.mark.parametrize(("changes", "says"), [case[1:] for case in WARNINGS], ids=[case[0] for case in WARNINGS])
def test_warns_and_plans_all_the_same(changes: dict[str, Any], says: str) -> None:
    changes = dict(changes)
    plan = make_plan(cases.config(model_changes=changes.pop("model", None), **changes))
    assert plan.feasible
    assert any(says in warning for warning in plan.warnings)


sizes = st.integers(1, 40)


@cases.examples(150)
@given(
    model=st.fixed_dictionaries(
        {
            "hidden_size": sizes,
            "intermediate_size": sizes,
            "num_hidden_layers": sizes,
            "num_attention_heads": sizes,
            "num_key_value_heads": st.none() | sizes,
            "vocab_size": sizes,
            "max_position_embeddings": sizes,
            "tie_word_embeddings": st.booleans(),
        }
    ),
    cluster=st.fixed_dictionaries({"nodes": st.integers(1, 5) | st.just("auto"), "gpus_per_node": st.integers(1, 9)}),
    parallel=st.fixed_dictionaries(
        {
            "data": st.just("auto") | sizes,
            "tensor": st.integers(1, 9),
            "pipeline": st.integers(1, 9),
            "context": st.integers(1, 3),
            "zero_stage": st.integers(0, 3),
            "zero_group": st.just("auto") | sizes,
            "virtual_stages": st.integers(1, 3),
            "schedule": st.sampled_from(
                ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]
            ),
            "stage_layers": st.just("auto") | st.lists(st.integers(-2, 9), max_size=6).map(tuple),
            "offload": st.sampled_from(["none", "all"]),
        }
    ),
    training=st.fixed_dictionaries(
        {"global_batch_size": sizes, "micro_batch_size": sizes, "sequence_length": sizes, "steps": st.none() | sizes}
    ),
)
def test_any_well_typed_configuration_gives_a_plan_or_problems_and_never_a_traceback(
    model: dict[str, Any], cluster: dict[str, Any], parallel: dict[str, Any], training: dict[str, Any]
) -> None:
    plan = make_plan(cases.config(model_changes=model, cluster=cluster, parallel=parallel, training=training))
    assert plan.feasible == (not plan.problems)
    assert all(problem.key and problem.message and problem.fix for problem in plan.problems)
    if plan.parallel is not None:
        assert plan.parallel.stage_layers[-1][1] == model["num_hidden_layers"]
        assert len(plan.ranks) == plan.parallel.world_size
    plan.to_dict()


@pytest.mark.parametrize(("micro_batch", "keys"), [
    (7, ["cluster.nodes", "training.global_batch_size"]),
    # 48 are no rounds of 2 x 16, but of 2 x 8: on the GPUs there are it is right.
    (2, ["cluster.nodes"]),
])  # fmt: skip
def test_too_few_gpus_hide_no_batch_that_is_wrong_on_them_as_well(micro_batch: int, keys: list[str]) -> None:
    training = {"global_batch_size": 48, "micro_batch_size": micro_batch}
    plan = make_plan(cases.config(cases.LLAMA_7B, parallel={"data": 16}, training=training))
    assert [problem.key for problem in plan.problems] == keys
