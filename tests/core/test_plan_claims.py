"""What the article says about plans, on the shipped experiments: reproduced, or refused with the reason.

The article's byte counts themselves are in test_plan_memory_published.py.
"""

from __future__ import annotations

import pytest

from orchestrator.config.compose import load_config
from orchestrator.plan.bounds import Bounds
from orchestrator.plan.evaluate import Evaluator
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.search import best_course, search
from orchestrator.plan.search_space import splits
from orchestrator.plan.stages import as_ranges

GB = 1e9


def _plan(experiment: str, *changes: str) -> RunPlan:
    return make_plan(load_config([f"+experiment={experiment}", *changes]))


def _kept(plan: RunPlan) -> int:
    assert plan.memory is not None
    return max(rank.persistent_bytes for rank in plan.memory.pipeline_ranks)


def test_s1_parameters_gradients_optimizer_and_activations_are_shown_apart() -> None:
    plan = _plan("llama70b_3d")
    assert plan.memory is not None
    for rank in plan.memory.pipeline_ranks:
        assert rank.total_bytes is not None
        assert rank.activations_bytes
        assert 0 < rank.parameters_bytes < rank.optimizer_bytes < rank.persistent_bytes < rank.total_bytes


def test_s2_a_full_copy_of_70b_in_2_bytes_is_refused_with_over_500_gb() -> None:
    plan = _plan("llama70b_3d", "parallel=ddp", "training.precision=bf16_pure", "training.micro_batch_size=1")
    assert _kept(plan) > 500 * GB
    assert [problem.key for problem in plan.problems] == ["cluster.gpu.memory_gib"]


def test_s4_a_tensor_group_never_leaves_its_node() -> None:
    plan = _plan("llama7b_3d")
    assert plan.parallel is not None
    assert (plan.parallel.tensor, plan.parallel.data) == (8, 8)
    nodes = {(place.pipeline, place.data, place.context): place.node for place in plan.ranks}
    assert all(nodes[place.pipeline, place.data, place.context] == place.node for place in plan.ranks)
    wide = _plan("llama7b_3d", "parallel.tensor=16", "parallel.data=4")
    assert [problem.key for problem in wide.problems] == ["parallel.tensor"]
    assert "node of 8 GPUs" in wide.problems[0].message


def test_s5_80_layers_over_8_pipeline_ranks_are_10_each_and_the_bubble_is_shown() -> None:
    plan = _plan("llama70b_3d", "parallel.pipeline=8")
    assert plan.parallel is not None
    assert plan.parallel.stage_layers == as_ranges((10,) * 8)
    assert plan.time.bubble_fraction
    assert plan.traffic.pipeline.bytes is not None
    assert plan.traffic.tensor.bytes is not None
    assert plan.traffic.pipeline.bytes < plan.traffic.tensor.bytes / 4


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"])
def test_s5_schedules_with_more_stages_a_rank_leave_less_bubble(schedule: str) -> None:
    changed = [f"parallel.schedule={schedule}", "parallel.virtual_stages=2"]
    alike = ["training.micro_batch_size=1", "training.activation_checkpointing=none"]
    plain = _plan("llama70b_3d", *alike).time.bubble_fraction
    other = _plan("llama70b_3d", *changed, *alike).time.bubble_fraction
    assert plain is not None
    assert other is not None
    assert other < plain


def test_s6_8_machines_of_8_gpus_are_refused_for_8_x_4_x_4_naming_both_numbers() -> None:
    plan = _plan("llama70b_3d", "cluster.nodes=8", "parallel.data=4")
    assert [problem.key for problem in plan.problems] == ["cluster.nodes"]
    problem = plan.problems[0]
    assert "tensor 8 x pipeline 4 x data 4 = 128" in problem.message
    assert "8 nodes x 8 = 64 GPUs" in problem.message
    assert "cluster.nodes=16" in problem.fix


def test_s6_on_16_machines_the_plan_is_placed() -> None:
    plan = _plan("llama70b_3d")
    assert plan.feasible
    assert plan.parallel is not None
    degrees = (plan.parallel.tensor, plan.parallel.pipeline, plan.parallel.data, plan.parallel.world_size)
    assert degrees == (8, 4, 4, 128)
    assert len({(place.node, place.gpu) for place in plan.ranks}) == 128
    assert {place.node for place in plan.ranks} == set(range(16))


def test_s7_tensor_lies_inside_a_node_and_pipeline_across_nodes() -> None:
    ranks = _plan("llama70b_3d").ranks
    for node in range(16):
        here = [place for place in ranks if place.node == node]
        assert sorted(place.tensor for place in here) == list(range(8))
        assert len({(place.pipeline, place.data) for place in here}) == 1


def test_s8_each_zero_stage_keeps_less_than_the_one_before() -> None:
    stages = [make_plan(load_config(["+experiment=llama7b_zero2", f"parallel=zero{stage}"])) for stage in (1, 2, 3)]
    full = _plan("llama7b_zero2", "parallel=ddp")
    peaks = [plan.memory.peak_bytes for plan in (full, *stages) if plan.memory and plan.memory.peak_bytes]
    assert len(peaks) == 4
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    # Stage 3 pays with traffic.
    data = [plan.traffic.data.bytes for plan in stages]
    assert data[2] is not None
    assert data[1] is not None
    assert data[2] > data[1]


def test_s10_one_gpu_with_offload_is_possible_and_slow() -> None:
    plan = _plan("llama7b_offload")
    assert plan.feasible
    assert _kept(plan) == 0
    assert plan.memory is not None
    assert plan.memory.pipeline_ranks[0].host_bytes
    on_gpu = _plan("llama7b_offload", "parallel.offload=none", "cluster.gpu.memory_gib=1000")
    assert plan.time.step_seconds is not None
    assert on_gpu.time.step_seconds is not None
    assert plan.time.tokens_per_second is not None
    assert plan.time.step_seconds > on_gpu.time.step_seconds


def test_s11_ddp_of_7b_keeps_54_gb_in_2_bytes_and_does_not_fit_with_fp32_master_weights() -> None:
    assert _kept(_plan("llama7b_ddp")) == pytest.approx(53.91 * GB, rel=1e-3)
    assert _plan("llama7b_ddp").feasible
    mixed = _plan("llama7b_ddp", "training.precision=bf16_mixed")
    assert [problem.key for problem in mixed.problems] == ["cluster.gpu.memory_gib"]
    assert "parallel.zero_stage=1" in mixed.problems[0].fix


def test_s12_zero_2_on_8_gpus_fits_with_room_for_a_larger_batch() -> None:
    plan = _plan("llama7b_zero2")
    assert plan.feasible
    assert plan.memory is not None
    assert plan.memory.peak_bytes is not None
    assert plan.memory.peak_bytes < 0.9 * plan.memory.capacity_bytes
    assert _plan("llama7b_zero2", "training.micro_batch_size=2").feasible
    days = plan.time.days
    assert days is not None
    assert 7 <= days <= 14


def test_s13_64_gpus_train_a_trillion_tokens_in_1_to_3_months() -> None:
    plan = _plan("llama7b_3d")
    assert plan.config.training.tokens == 10**12
    assert plan.time.days is not None
    assert 30 <= plan.time.days <= 92


@pytest.mark.parametrize("experiment", ["llama7b_zero2", "llama13b_zero2"])
def test_s14_up_to_13b_the_best_plan_on_8_gpus_only_shards_data_parallel_ranks(experiment: str) -> None:
    best = search(load_config([f"+experiment={experiment}"])).ranked[0].candidate.split
    assert (best.tensor, best.pipeline, best.data) == (1, 1, 8)
    assert best.zero_stage >= 1


def test_s14_70b_on_128_gpus_needs_a_split_of_the_model_or_of_its_parameters() -> None:
    config = load_config(["+experiment=llama70b_3d"])
    bounds = Bounds(Evaluator(config))
    plain = [split for split in splits(config) if split.tensor * split.pipeline == 1 and not split.offload]
    assert {split.zero_stage for split in plain} == {0, 1, 2, 3}
    assert all(best_course(bounds, split) is None for split in plain if split.zero_stage < 3)
    assert any(best_course(bounds, split) is not None for split in plain if split.zero_stage == 3)
