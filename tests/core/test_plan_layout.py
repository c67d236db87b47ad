"""Ranks, coordinates and nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.inventory import take_inventory, uniform_cluster, weakest_gpu
from orchestrator.plan.layout import Coordinates, Degrees, coordinates_of, nodes_needed, place_ranks, rank_of
from orchestrator.plan.make import make_plan
from tests.core import plan_cases as cases

degree = st.integers(1, 6)
degrees = st.builds(Degrees, pipeline=degree, data=degree, context=degree, tensor=degree)


@cases.examples(50)
@given(degrees, st.data())
def test_coordinates_and_ranks_are_inverse(shape: Degrees, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, shape.world_size - 1))
    assert rank_of(coordinates_of(rank, shape), shape) == rank


def test_tensor_is_innermost_and_pipeline_outermost() -> None:
    shape = Degrees(pipeline=2, data=3, context=2, tensor=4)
    assert coordinates_of(1, shape) == Coordinates(0, 0, 0, 1)
    assert coordinates_of(4, shape) == Coordinates(0, 0, 1, 0)
    assert coordinates_of(8, shape) == Coordinates(0, 1, 0, 0)
    assert coordinates_of(24, shape) == Coordinates(1, 0, 0, 0)


@cases.examples(50)
@given(degrees, st.integers(1, 9))
def test_no_tensor_group_crosses_a_node_and_no_gpu_is_given_twice(shape: Degrees, spare: int) -> None:
    per_node = shape.tensor + spare - 1
    nodes = nodes_needed(shape.world_size, shape.tensor, per_node)
    cluster = cases.config(cluster={"nodes": nodes, "gpus_per_node": per_node}).cluster
    places = place_ranks(shape, take_inventory(cluster))
    assert len({(place.node, place.gpu) for place in places}) == shape.world_size
    assert all(place.gpu < per_node and place.node < nodes for place in places)
    group_nodes: dict[tuple[int, int, int], set[int]] = {}
    for place in places:
        group_nodes.setdefault((place.pipeline, place.data, place.context), set()).add(place.node)
    assert all(len(found) == 1 for found in group_nodes.values())


def test_too_few_nodes_cannot_be_laid_out() -> None:
    inventory = take_inventory(cases.config(cluster={"nodes": 1}).cluster)
    with pytest.raises(ValueError, match="9 ranks do not fit"):
        place_ranks(Degrees(1, 9, 1, 1), inventory)


def test_the_70b_plan_puts_each_pipeline_rank_on_four_whole_nodes() -> None:
    plan = make_plan(
        cases.config(cases.LLAMA2_70B, cluster={"nodes": 16}, parallel={"tensor": 8, "pipeline": 4, "zero_stage": 1})
    )
    assert plan.feasible
    for place in plan.ranks:
        assert place.pipeline == place.node // 4
        assert place.data == place.node % 4
        assert place.tensor == place.gpu


UNLIKE = {
    "node_groups": [
        {"nodes": 1, "gpus_per_node": 8, "gpu": cases.A100_80GB},
        {"nodes": 2, "gpus_per_node": 4, "gpu": cases.V100_32GB, "network_gbps_per_gpu": 25},
    ]
}


def test_unlike_nodes_are_counted_together_and_the_weakest_figure_of_each_kind_counts() -> None:
    cluster = cases.config(cluster=UNLIKE).cluster
    inventory = take_inventory(cluster)
    gpu = weakest_gpu(inventory)
    assert inventory.gpus == 16
    assert inventory.describe() == "1 node x 8 + 2 nodes x 4 = 16 GPUs"
    assert (gpu.memory_gib, gpu.memory_bandwidth_gb_per_s, gpu.nvlink_gb_per_s) == (31.7, 900, 150)
    assert gpu.peak_tflops.fp16 == 125
    assert gpu.peak_tflops.bf16 is None
    uniform = uniform_cluster(cluster, 3)
    assert (uniform.nodes, uniform.gpus_per_node, uniform.network_gbps_per_gpu) == (3, 4, 25)


def test_a_price_of_unlike_gpus_is_their_mean_and_unknown_if_one_is_unknown() -> None:
    dear = {**cases.A100_80GB, "price_per_hour": 4.0}
    groups = [
        {"nodes": 1, "gpus_per_node": 8, "gpu": dear},
        {"nodes": 3, "gpus_per_node": 8, "gpu": {**cases.A100_40GB, "price_per_hour": 2.0}},
    ]
    inventory = take_inventory(cases.config(cluster={"node_groups": groups}).cluster)
    assert weakest_gpu(inventory).price_per_hour == 2.5
    assert weakest_gpu(take_inventory(cases.config(cluster=UNLIKE).cluster)).price_per_hour is None


def test_tensor_groups_use_only_whole_parts_of_a_node_and_the_rest_is_said_to_idle() -> None:
    plan = make_plan(
        cases.config(
            model_changes={"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
            parallel={"tensor": 3},
            training={"global_batch_size": 4},
        )
    )
    assert plan.feasible
    assert plan.parallel is not None
    assert plan.parallel.data == 2
    assert any("6 of 8 GPUs" in warning for warning in plan.warnings)
