"""All that a rank hands to collectives: what FSDP2's habits and a cut sequence add to the traffic that takes time."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.plan.facts import derive
from orchestrator.plan.make import parallel_facts
from orchestrator.plan.profiles import OURS
from orchestrator.plan.rank_traffic import rank_traffic
from orchestrator.plan.step_seconds import loads
from orchestrator.plan.work import work_of
from tests.core import plan_cases as cases

FOUR_BLOCKS = {**cases.LLAMA_7B, "num_hidden_layers": 4}
GPT = {**FOUR_BLOCKS, "family": "gpt", "intermediate_size": 16384, "attention_bias": True}
HIDDEN, SEQUENCE = 4096, 4096


def traffic(model: dict[str, Any], micro_batches: int, **parallel: Any) -> list[dict[str, tuple[int, int]]]:
    """(bytes, calls) by axis of every pipeline rank."""
    data = parallel.setdefault("data", 1)
    config = cases.config(
        model,
        cluster={"nodes": 4},
        parallel=parallel,
        training={"global_batch_size": data * micro_batches, "micro_batch_size": 1, "activation_checkpointing": "none"},
    )
    work = work_of(config, parallel_facts(derive(config)))
    ranks = (rank_traffic(work, OURS, load, rank) for rank, load in enumerate(loads(work)))
    return [{str(axis): handed_in for axis, handed_in in each.items()} for each in ranks]


@pytest.mark.parametrize("axis", ["tensor", "data", "pipeline"])
def test_loss_and_norm_are_one_sum_over_the_axis_that_all_ranks_are_on(axis: str) -> None:
    def calls(degrees: dict[str, int]) -> dict[str, int]:
        found = traffic({**FOUR_BLOCKS, "num_hidden_layers": 8}, 8, zero_stage=0, **degrees)[0]
        return {name: count for name, (_, count) in found.items() if count}

    alone = calls({axis: 2})
    both = calls({axis: 2, "data" if axis != "data" else "tensor": 2})
    assert list(alone) == [axis]
    assert alone[axis] == both[axis] + 1


@pytest.mark.parametrize("stage, times, element_bytes", [(0, 1, 4), (1, 1, 4), (2, 4, 2), (3, 4, 2)])
def test_a_cut_sequence_sums_each_norms_gradient_when_its_unit_is_reduced(
    stage: int, times: int, element_bytes: int
) -> None:
    """Two norms a block and the last one, in the type that they are added up in."""
    degrees = {"data": 2, "tensor": 4, "zero_stage": stage}
    (cut,) = traffic(FOUR_BLOCKS, 4, sequence_parallel=True, **degrees)
    (whole,) = traffic(FOUR_BLOCKS, 4, sequence_parallel=False, **degrees)
    streams, stream = 4 * (2 * 4 * 4 + 2 * 2), HIDDEN * SEQUENCE * 2
    norms = 2 * 4 + 1
    # Gathers and scatters in pairs instead of sums, beside the norms.
    assert cut["tensor"][1] == whole["tensor"][1] + streams // 2 + norms * times
    handed_in = streams // 2 * stream // 4 + norms * times * HIDDEN * element_bytes
    assert cut["tensor"][0] == whole["tensor"][0] + handed_in


def test_a_table_of_positions_gets_its_gradient_from_the_whole_sequence() -> None:
    degrees = {"data": 2, "tensor": 4, "zero_stage": 2, "sequence_parallel": True}
    (llama,), (gpt,) = traffic(FOUR_BLOCKS, 4, **degrees), traffic(GPT, 4, **degrees)
    # Four norm weights and biases and two biases of products a block, two in front of the head; one gather.
    assert gpt["tensor"][1] - llama["tensor"][1] == 4 * ((6 - 2) * 4 + (2 - 1) + 1)


def test_whole_backward_passes_gather_ahead_what_nobody_uses_and_split_ones_do_not() -> None:
    degrees = {"data": 4, "pipeline": 2, "zero_stage": 1, "virtual_stages": 2}
    eight = {**FOUR_BLOCKS, "num_hidden_layers": 8}
    units = 4 + 1
    for schedule, unused in (("interleaved_1f1b", 1), ("interleaved_zero_bubble", 0)):
        assert [each["data"][1] for each in traffic(eight, 8, schedule=schedule, **degrees)] == [2 * units + unused] * 2


def test_of_four_stages_three_are_gathered_at_a_time() -> None:
    """Where torch gathers whole stages itself; a rank that has more of them gathers one again when its turn comes."""
    degrees: dict[str, Any] = {"data": 2, "pipeline": 2, "zero_stage": 1, "schedule": "interleaved_zero_bubble"}
    sixteen = {**FOUR_BLOCKS, "num_hidden_layers": 24}
    few, many = (traffic(sixteen, 8, virtual_stages=count, **degrees)[0]["data"] for count in (3, 4))
    assert few[1] == 2 * (12 + 1)
    assert many[1] > few[1] and many[0] > few[0]
