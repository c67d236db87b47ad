"""`make_plan` as a whole: the JSON contract, purity, idempotence, unlike nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from orchestrator.config.compose import load_config
from orchestrator.config.schema import RunConfig
from orchestrator.plan.engine_rules import LIMITS, engine_problems
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import CostPlan, MemoryPlan, RankMemory, RankPlace, TimePlan, TrafficPlan
from orchestrator.plan.vocabulary import padded_rows
from tests.core import plan_cases as cases

EXPERIMENTS = sorted(path.stem for path in Path("conf/experiment").glob("*.yaml"))

TOP = ("schema_version", "feasible", "profile", "config", "warnings", "problems")
SECTIONS = {
    "model": ("parameters", "flops_per_token"),
    "parallel": (
        *("data", "tensor", "pipeline", "context", "zero_stage", "zero_group", "replicate", "world_size", "schedule"),
        *("virtual_stages", "micro_batches", "stage_layers"),
    ),
    "memory": ("capacity_bytes", "peak_bytes", "checkpoint_bytes", "pipeline_ranks"),
    "time": tuple(field.name for field in fields(TimePlan)),
    "traffic": tuple(field.name for field in fields(TrafficPlan)),
    "cost": tuple(field.name for field in fields(CostPlan)),
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_shipped_experiment_has_a_whole_plan(experiment: str) -> None:
    plan = make_plan(load_config([f"+experiment={experiment}"]))
    assert plan.problems == ()
    values = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert tuple(values) == (*TOP, *SECTIONS, "ranks")
    for section, keys in SECTIONS.items():
        assert tuple(values[section]) == keys
    assert RunConfig.model_validate(values["config"]) == plan.config
    assert plan.memory is not None
    for rank in plan.memory.pipeline_ranks:
        _adds_up(rank)
    _times_add_up(plan.time)
    assert plan.parallel is not None
    assert [place.rank for place in plan.ranks] == list(range(plan.parallel.world_size))


def _adds_up(rank: RankMemory) -> None:
    names = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
    sizes = [getattr(rank, f"{name}_bytes") for name in names]
    assert all(size is not None and size >= 0 for size in sizes)
    assert rank.total_bytes == sum(sizes)


def _times_add_up(time: TimePlan) -> None:
    if time.step_seconds is None:
        return
    exposed = ("compute", "tensor", "pipeline", "bubble", "context", "data", "optimizer", "offload")
    assert sum(getattr(time, f"{name}_seconds") for name in exposed) == pytest.approx(time.step_seconds)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_planning_a_plan_s_own_configuration_gives_the_same_plan(experiment: str) -> None:
    first = make_plan(load_config([f"+experiment={experiment}"]))
    assert make_plan(RunConfig.model_validate(first.to_dict()["config"])) == first


def test_planning_imports_neither_torch_nor_ray_nor_hydra() -> None:
    code = """
import sys
from orchestrator.plan import make, explain, explain_search, search, auto
from tests.core import plan_cases
make.make_plan(plan_cases.config(parallel={"strategy": "auto"}))
heavy = {"torch", "ray", "hydra", "omegaconf", "mlflow"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_refused_plan_still_says_what_the_model_is_and_computes_nothing_else() -> None:
    plan = make_plan(cases.config(training={"global_batch_size": 63}))
    assert not plan.feasible
    assert plan.model is not None
    assert plan.model.parameters > 0
    assert (plan.parallel, plan.memory, plan.ranks, plan.time) == (None, None, (), TimePlan())
    assert any("while the problems stand" in warning for warning in plan.warnings)


def test_a_plan_that_does_not_fit_keeps_its_memory_so_that_one_sees_why() -> None:
    plan = make_plan(cases.config(cases.LLAMA2_70B))
    assert not plan.feasible
    assert isinstance(plan.memory, MemoryPlan)
    assert plan.memory.peak_bytes is not None
    assert plan.memory.peak_bytes > plan.memory.capacity_bytes


def test_the_degree_without_sharding_is_replication() -> None:
    facts = make_plan(cases.config()).parallel
    assert facts is not None
    assert (facts.zero_group, facts.replicate) == (1, 8)
    hybrid = make_plan(cases.config(parallel={"zero_stage": 3, "zero_group": 4})).parallel
    assert hybrid is not None
    assert (hybrid.zero_group, hybrid.replicate) == (4, 2)
    whole = make_plan(cases.config(parallel={"zero_stage": 2, "context": 2})).parallel
    assert whole is not None
    assert (whole.data, whole.zero_group, whole.replicate) == (4, 8, 1)


def test_unlike_nodes_are_planned_for_the_weakest_and_placed_where_they_are() -> None:
    groups = [
        {"nodes": 1, "gpus_per_node": 8, "gpu": cases.H100_80GB},
        {"nodes": 2, "gpus_per_node": 4, "gpu": cases.A100_40GB},
    ]
    plan = make_plan(
        cases.config(cases.LLAMA_7B, cluster={"node_groups": groups}, parallel={"tensor": 4, "zero_stage": 1})
    )
    assert plan.memory is not None
    assert plan.memory.capacity_bytes == int(39.4 * 2**30)
    assert [place.node for place in plan.ranks] == [0] * 8 + [1] * 4 + [2] * 4
    assert plan.ranks[8] == RankPlace(rank=8, node=1, gpu=0, data=2, pipeline=0, context=0, tensor=0)
    slow = make_plan(
        cases.config(
            cases.LLAMA_7B,
            cluster={"nodes": 4, "gpus_per_node": 4, "gpu": cases.A100_40GB},
            parallel={"tensor": 4, "zero_stage": 1},
        )
    )
    assert plan.time.compute_seconds == pytest.approx(slow.time.compute_seconds)


def test_nodes_too_small_for_a_tensor_group_take_no_part() -> None:
    groups = [
        {"nodes": 2, "gpus_per_node": 4, "gpu": cases.A100_40GB},
        {"nodes": 1, "gpus_per_node": 8, "gpu": cases.A100_80GB},
    ]
    model = {"num_key_value_heads": 8}
    plan = make_plan(cases.config(model_changes=model, cluster={"node_groups": groups}, parallel={"tensor": 8}))
    assert plan.feasible
    assert {place.node for place in plan.ranks} == {2}
    assert plan.memory is not None
    assert plan.memory.capacity_bytes == int(79.2 * 2**30)
    assert any("8 of 16 GPUs" in warning for warning in plan.warnings)


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.key for limit in LIMITS])
def test_what_the_engine_cannot_run_is_a_key_of_the_schema_and_refused_with_what_it_runs(limit: object) -> None:
    key = limit.key  # type: ignore[attr-defined]
    section, name = key.split(".")
    assert name in type(getattr(cases.config(), section)).model_fields


def test_the_engine_s_limits_are_problems_of_a_plan_that_is_otherwise_feasible() -> None:
    plan = make_plan(cases.config(training={"precision": "bf16_pure"}, cluster={"nodes": 1}))
    assert plan.feasible
    for problem in engine_problems(plan):
        assert "can be planned" in problem.message
        assert problem.key in problem.fix


@pytest.mark.parametrize(
    ("parallel", "rows"),
    [
        ({"tensor": 1, "data": 8, "zero_stage": 3}, 50257),
        ({"tensor": 2, "data": 4}, 50258),
        ({"tensor": 2, "data": 4, "zero_stage": 1}, 50264),
        ({"tensor": 2, "data": 4, "zero_stage": 3, "zero_group": 2}, 50260),
        ({"tensor": 4, "data": 2}, 50260),
    ],
)
def test_a_vocabulary_that_tensor_ranks_cannot_share_evenly_is_padded_and_the_plan_says_so(
    parallel: dict[str, object], rows: int
) -> None:
    plan = make_plan(cases.config(model_changes={"vocab_size": 50257}, parallel=parallel, cluster={"nodes": 1}))
    assert plan.feasible and plan.parallel is not None and plan.model is not None
    assert not engine_problems(plan)
    assert padded_rows(50257, plan.parallel) == rows
    assert any(f"padded to {rows} rows in memory" in warning for warning in plan.warnings) == (rows != 50257)
    assert plan.model == make_plan(cases.config(model_changes={"vocab_size": 50257}, cluster={"nodes": 1})).model


def test_dropout_runs_under_tensor_parallelism() -> None:
    dropping = cases.config(
        model_changes={"attention_dropout": 0.1, "resid_pdrop": 0.1}, parallel={"tensor": 2}, cluster={"nodes": 1}
    )
    assert not engine_problems(make_plan(dropping))
