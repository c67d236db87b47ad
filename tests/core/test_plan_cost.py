"""Time, traffic and price of a plan: sums, bounds, what each part depends on, and what is not known."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.spec import flops_per_token
from orchestrator.config.schema import RunConfig
from orchestrator.plan.collectives import Group, bus_rate, collective_seconds
from orchestrator.plan.constants import FITTED, RESERVE_SHARES, Fitted
from orchestrator.plan.cost import cost_plan, step_time
from orchestrator.plan.device import Device, device_of
from orchestrator.plan.facts import derive
from orchestrator.plan.make import make_plan, parallel_facts
from orchestrator.plan.profiles import OURS
from orchestrator.plan.run_plan import TimePlan, TrafficPlan
from orchestrator.plan.schedules import Shape
from orchestrator.plan.step_seconds import bubble_turns
from tests.core import plan_cases as cases

EXPOSED = ("compute", "tensor", "pipeline", "bubble", "context", "data", "optimizer", "offload")
A100 = Device(312e12, 312e12, 2039e9, 300e9, 25e9, 31e9, 8)
PARAMETERS_7B = 6738415616


def plan(config: RunConfig) -> tuple[TimePlan, TrafficPlan]:
    return step_time(config, parallel_facts(derive(config)), OURS)


def seconds(config: RunConfig) -> float:
    found = plan(config)[0].step_seconds
    assert found is not None
    return found


@cases.examples(60)
@given(
    pipeline=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    stage=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
    micro_batch=st.sampled_from([1, 2]),
)
def test_exposed_times_are_not_negative_and_add_up_to_the_step(
    pipeline: int, tensor: int, context: int, stage: int, recompute: str, micro_batch: int
) -> None:
    config = cases.config(
        cases.LLAMA_7B,
        cluster={"nodes": 8},
        parallel={"pipeline": pipeline, "tensor": tensor, "context": context, "zero_stage": stage},
        training={
            "activation_checkpointing": recompute,
            "micro_batch_size": micro_batch,
            "global_batch_size": 1024,
        },
    )
    time, traffic = plan(config)
    parts = [getattr(time, f"{name}_seconds") for name in EXPOSED]
    assert all(part >= 0 for part in parts)
    assert time.step_seconds == pytest.approx(sum(parts))
    assert (time.bubble_seconds == 0) == (pipeline == 1)
    assert (traffic.tensor.calls == 0) == (tensor == 1)
    assert (traffic.context.calls == 0) == (context == 1)
    assert (traffic.pipeline.calls == 0) == (pipeline == 1)


def test_tokens_and_mfu_follow_from_the_step() -> None:
    config = cases.config(cases.LLAMA_7B, parallel={"data": 8, "zero_stage": 2}, training={"global_batch_size": 512})
    time, _ = plan(config)
    assert time.step_seconds is not None and time.tokens_per_second_per_gpu is not None
    assert time.tokens_per_second == pytest.approx(512 * 4096 / time.step_seconds)
    flops = flops_per_token(config.model, 4096)
    assert time.mfu == pytest.approx(time.tokens_per_second_per_gpu * flops / 312e12)
    assert 0.3 < (time.mfu or 0) < 0.7


def test_days_gpu_hours_and_price_follow_from_tokens() -> None:
    config = cases.config(
        cases.LLAMA_7B,
        parallel={"data": 8, "zero_stage": 2},
        training={"global_batch_size": 512, "steps": None, "tokens": 1_000_000_000_000},
    )
    plan = make_plan(config)
    steps = -(-1_000_000_000_000 // (512 * 4096))
    assert plan.time.step_seconds is not None and plan.cost.gpu_hours is not None
    assert plan.time.days == pytest.approx(steps * plan.time.step_seconds / 86400)
    assert plan.cost.gpu_hours == pytest.approx((plan.time.days or 0) * 24 * 8)
    assert plan.cost.total == pytest.approx(plan.cost.gpu_hours * 2.0)
    assert plan.cost.currency == "USD"


def test_without_a_price_there_are_hours_and_no_cost() -> None:
    gpu = {**cases.A100_80GB, "price_per_hour": None}
    config = cases.config(cases.LLAMA_7B, cluster={"gpu": gpu}, parallel={"data": 8, "zero_stage": 2})
    time, _ = plan(config)
    cost = cost_plan(config, parallel_facts(derive(config)), time)
    assert cost.gpu_hours is not None
    assert (cost.total, cost.currency, cost.price_per_gpu_hour) == (None, None, None)


@pytest.mark.parametrize("unknown", ["memory_bandwidth_gb_per_s", "peak_tflops"])
def test_a_gpu_without_a_needed_rate_has_no_times_but_its_traffic_is_known(unknown: str) -> None:
    gpu = {key: value for key, value in cases.A100_80GB.items() if key != unknown}
    config = cases.config(cases.LLAMA_7B, cluster={"gpu": gpu}, parallel={"data": 8, "zero_stage": 2})
    time, traffic = plan(config)
    assert time == TimePlan()
    assert traffic.data.bytes


def test_a_group_over_nodes_without_a_network_rate_has_no_times() -> None:
    config = cases.config(
        cases.LLAMA_7B, cluster={"nodes": 2, "network_gbps_per_gpu": None}, parallel={"zero_stage": 2}
    )
    assert plan(config)[0].step_seconds is None
    within = cases.config(cases.LLAMA_7B, cluster={"network_gbps_per_gpu": None}, parallel={"zero_stage": 2})
    assert plan(within)[0].step_seconds is not None


@pytest.mark.parametrize("stage, gathers, reductions", [(0, 0, 1), (1, 1, 1), (2, 1, 4), (3, 8, 4)])
def test_data_traffic_is_the_input_payload_of_what_each_stage_sends(stage: int, gathers: int, reductions: int) -> None:
    """Four micro-batches: gathers of BF16 shards, reductions of whole FP32 gradients."""
    config = cases.config(cases.LLAMA_7B, parallel={"data": 8, "zero_stage": stage}, training={"global_batch_size": 32})
    traffic = plan(config)[1].data
    units = 32 + 2
    assert traffic.bytes == pytest.approx(PARAMETERS_7B * (2 * gathers / 8 + 4 * reductions), rel=1e-6)
    # Loss and norm are summed once a step.
    assert traffic.calls == units * (gathers + reductions) + 1


def test_replicas_of_a_smaller_zero_group_add_one_all_reduce_of_the_shard() -> None:
    def data(group: int) -> float:
        config = cases.config(cases.LLAMA_7B, parallel={"data": 8, "zero_stage": 2, "zero_group": group})
        return float(plan(config)[1].data.bytes or 0)

    assert data(4) - data(8) == pytest.approx(PARAMETERS_7B * (2 / 4 - 2 / 8 + 4 / 4), rel=1e-6)


@pytest.mark.parametrize("recompute, gathers, sums", [("none", 4, 4), ("selective", 6, 4), ("full", 6, 5)])
def test_tensor_traffic_is_two_pairs_a_block_each_way_and_again_what_is_repeated_but_the_last_sum(
    recompute: str, gathers: int, sums: int
) -> None:
    config = cases.config(
        cases.LLAMA_7B,
        parallel={"tensor": 8, "data": 1, "sequence_parallel": True},
        training={"activation_checkpointing": recompute, "global_batch_size": 2, "micro_batch_size": 1},
    )
    traffic = plan(config)[1].tensor
    gathers, sums = (2 * (32 * each + 2) for each in (gathers, sums))
    stream = 4096 * 4096 * 2
    # The loss exchanges two numbers a token, once a micro-batch; once a step 65 norms' gradients are summed, and loss
    # and norm of the model.
    assert traffic.calls == gathers + sums + 2 + 65 + 1
    assert traffic.bytes == gathers * stream // 8 + sums * stream + 2 * 4096 * 8 + 65 * 4096 * 4 + 16


def test_a_middle_pipeline_rank_sends_both_ways_once_for_each_micro_batch() -> None:
    config = cases.config(
        cases.LLAMA_7B, parallel={"pipeline": 4, "data": 2}, training={"global_batch_size": 32, "micro_batch_size": 1}
    )
    traffic = plan(config)[1].pipeline
    assert traffic.calls == 2 * 16
    assert traffic.bytes == 2 * 16 * 4096 * 4096 * 2


def test_a_v_shaped_schedule_does_not_send_at_its_turn() -> None:
    def calls(schedule: str) -> int:
        config = cases.config(
            cases.LLAMA_7B,
            parallel={"pipeline": 2, "data": 4, "schedule": schedule, "virtual_stages": 2},
            training={"global_batch_size": 64, "micro_batch_size": 1},
        )
        return plan(config)[1].pipeline.calls or 0

    assert calls("interleaved_1f1b") == 3 * 16
    assert calls("zbv_zero_bubble") == 2 * 16


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pipeline, micro_batches", [(2, 2), (4, 8), (8, 64), (16, 512)])
def test_a_pipeline_of_equal_stages_waits_p_minus_1_turns(schedule: str, pipeline: int, micro_batches: int) -> None:
    assert bubble_turns(Shape(schedule, pipeline, 1, micro_batches), 2.0) == pytest.approx(pipeline - 1)


@pytest.mark.parametrize("virtual", [2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(virtual: int) -> None:
    assert bubble_turns(Shape("interleaved_1f1b", 4, virtual, 16), 2.0) == pytest.approx(3 / virtual)


def test_zero_bubble_schedules_leave_less_than_1f1b() -> None:
    plain = bubble_turns(Shape("1f1b", 4, 1, 16), 2.0)
    assert (
        bubble_turns(Shape("zbv_zero_bubble", 4, 2, 16), 2.0)
        < bubble_turns(Shape("interleaved_1f1b", 4, 2, 16), 2.0)
        < plain
    )


def test_the_bubble_fraction_of_equal_stages_is_the_textbooks() -> None:
    config = cases.config(
        {**cases.LLAMA_7B, "vocab_size": 1},
        parallel={"pipeline": 4, "data": 2},
        training={"global_batch_size": 32, "micro_batch_size": 1},
    )
    time, _ = plan(config)
    assert time.bubble_fraction == pytest.approx(3 / (16 + 3), rel=0.02)


@pytest.mark.parametrize("group, rate", [
    (Group(8, 1), 300e9 * FITTED.nvlink_share),
    (Group(4, 2), 300e9 * FITTED.nvlink_share),
    (Group(16, 1), 8 * 25e9 * FITTED.network_share),
    (Group(4, 8), 25e9 * FITTED.network_share),
    (Group(16, 4), 2 * 25e9 * FITTED.network_share),
])  # fmt: skip
def test_a_group_is_as_fast_as_its_slowest_link(group: Group, rate: float) -> None:
    assert bus_rate(group, A100, FITTED) == pytest.approx(rate)


def test_small_collectives_are_bound_by_latency_and_large_ones_by_bandwidth() -> None:
    group = Group(16, 1)

    def rate(payload: float) -> float:
        found = collective_seconds("all_reduce", payload, 1, group, A100, FITTED)
        assert found is not None
        return payload / found

    assert rate(1e4) < 0.01 * rate(1e9)
    assert rate(1e9) == pytest.approx(rate(2e9), rel=0.05)
    assert collective_seconds("all_gather", 1e9, 1, Group(1, 1), A100, FITTED) == 0.0


def test_tensor_parallelism_over_more_ranks_computes_less_and_talks_more() -> None:
    def times(tensor: int) -> TimePlan:
        config = cases.config(
            cases.LLAMA_7B,
            cluster={"nodes": 8},
            parallel={"tensor": tensor, "data": 8, "sequence_parallel": tensor > 1},
            training={"global_batch_size": 512, "micro_batch_size": 1},
        )
        return plan(config)[0]

    computing = [times(tensor).compute_seconds or 0 for tensor in (1, 2, 4, 8)]
    talking = [times(tensor).tensor_seconds or 0 for tensor in (1, 2, 4, 8)]
    assert computing == sorted(computing, reverse=True)
    assert talking[0] == 0 and talking[1:] == sorted(talking[1:])


def test_offload_is_much_slower_and_says_so_in_its_own_time() -> None:
    """One A100 with all states on the host: possible, and each GPU much slower than one of eight that share them."""
    one = cases.config(
        cases.LLAMA_7B,
        cluster={"gpus_per_node": 1},
        parallel={"data": 1, "zero_stage": 3, "offload": "all"},
        training={"micro_batch_size": 1, "global_batch_size": 8},
    )
    time, traffic = plan(one)
    assert time.step_seconds is not None and time.offload_seconds is not None
    assert time.offload_seconds > 0.4 * time.step_seconds
    assert traffic.offload.bytes == 8 * (2 * 4 + 4) * PARAMETERS_7B
    eight = cases.config(
        cases.LLAMA_7B, parallel={"zero_stage": 3}, training={"micro_batch_size": 1, "global_batch_size": 64}
    )
    rate_of_eight = plan(eight)[0].tokens_per_second_per_gpu
    assert time.tokens_per_second is not None and rate_of_eight is not None
    assert time.tokens_per_second < rate_of_eight / 2.5


@pytest.mark.parametrize("worse", ["memory_bandwidth_gb_per_s", "nvlink_gb_per_s"])
def test_a_slower_gpu_is_never_faster(worse: str) -> None:
    def step(gpu: dict[str, Any]) -> float:
        return seconds(
            cases.config(cases.LLAMA_7B, cluster={"gpu": gpu}, parallel={"tensor": 4, "data": 2, "zero_stage": 2})
        )

    assert step({**cases.A100_80GB, worse: cases.A100_80GB[worse] / 2}) > step(cases.A100_80GB)  # type: ignore[operator]


def test_the_seven_billion_model_on_64_gpus_takes_one_to_three_months_for_a_trillion_tokens() -> None:
    config = cases.config(
        cases.LLAMA_7B,
        cluster={"nodes": 8},
        parallel={"tensor": 8, "data": 8, "sequence_parallel": True},
        training={
            "global_batch_size": 1024,
            "micro_batch_size": 4,
            "activation_checkpointing": "none",
            "steps": None,
            "tokens": 1_000_000_000_000,
        },
    )
    made = make_plan(config)
    assert made.feasible
    assert 30 <= (made.time.days or 0) <= 92


def test_the_device_takes_its_peak_from_the_precision() -> None:
    cluster = cases.config().cluster
    assert device_of(cluster, "bf16_mixed").peak_flops == 312e12
    assert device_of(cluster, "fp32").peak_flops == 19.5e12
    v100 = cases.config(cluster={"gpu": cases.V100_32GB}).cluster
    assert device_of(v100, "bf16_pure").peak_flops is None


def test_at_most_24_numbers_are_fitted() -> None:
    assert len(fields(Fitted)) + len(RESERVE_SHARES) <= 24
