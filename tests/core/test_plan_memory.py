"""Memory of a plan: model states to the byte, activations by schedule and recomputation, the instant of the peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.spec import parameter_specs
from orchestrator.config.schema import RunConfig
from orchestrator.plan.activations import block_activations, head_activations, logits_bytes
from orchestrator.plan.facts import derive
from orchestrator.plan.make import make_plan, parallel_facts
from orchestrator.plan.memory import checkpoint_bytes, memories_of, rank_memories
from orchestrator.plan.profiles import OURS, PROFILES, profile_named
from orchestrator.plan.run_plan import RankMemory
from orchestrator.plan.work import Work, work_of
from tests.core import plan_cases as cases

BARE = replace(OURS, reserve_share=0.0, context_bytes=0, process_bytes=0)
"""Ours without what allocator and context take."""
CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")


def memories(config: RunConfig, profile: Any = BARE) -> tuple[RankMemory, ...]:
    return rank_memories(config, parallel_facts(derive(config)), profile)


def work(config: RunConfig) -> Work:
    return work_of(config, parallel_facts(derive(config)))


def plan_of(**changes: Any) -> RunConfig:
    """LLaMA-7B on 8 A100, one micro-batch of one sequence a rank."""
    training = {"global_batch_size": 8, **changes.pop("training", {})}
    return cases.config(cases.LLAMA_7B, training=training, **changes)


PARAMETERS_7B = 6738415616


@pytest.mark.parametrize("precision, parameters, gradients, moments", [
    ("fp32", 4, 4, 8), ("bf16_mixed", 4, 4, 8), ("fp16_mixed", 4, 4, 8), ("bf16_pure", 2, 2, 4),
])  # fmt: skip
def test_each_precision_keeps_its_bytes_per_parameter(
    precision: str, parameters: int, gradients: int, moments: int
) -> None:
    (rank,) = memories(plan_of(parallel={"data": 8}, training={"precision": precision}))
    assert rank.parameters_bytes == parameters * PARAMETERS_7B
    assert rank.optimizer_bytes == moments * PARAMETERS_7B
    assert rank.persistent_bytes == (parameters + gradients + moments) * PARAMETERS_7B


@pytest.mark.parametrize("stage, parameters, gradients, optimizer", [
    (0, 1, 1, 1), (1, 8, 1, 8), (2, 8, 8, 8), (3, 8, 8, 8),
])  # fmt: skip
def test_each_zero_stage_shares_what_the_engine_shares_while_it_accumulates(
    stage: int, parameters: int, gradients: int, optimizer: int
) -> None:
    accumulating = plan_of(parallel={"data": 8, "zero_stage": stage}, training={"global_batch_size": 16})
    (rank,) = memories(accumulating)
    assert rank.parameters_bytes == pytest.approx(4 * PARAMETERS_7B / parameters, rel=1e-6)
    assert rank.optimizer_bytes == pytest.approx(8 * PARAMETERS_7B / optimizer, rel=1e-6)
    kept = rank.persistent_bytes - rank.parameters_bytes - rank.optimizer_bytes
    assert kept == pytest.approx(4 * PARAMETERS_7B / gradients, rel=1e-6)


BLOCK_7B = 202383360
"""Elements of one block of LLaMA-7B, its largest unit."""
HEAD_7B = 32000 * 4096 + 4096
"""Of its head and final norm."""


@pytest.mark.parametrize("stage, elements", [
    (0, PARAMETERS_7B - BLOCK_7B - HEAD_7B),
    (1, PARAMETERS_7B + HEAD_7B),
    (2, PARAMETERS_7B + HEAD_7B),
    (3, 2 * BLOCK_7B),
])  # fmt: skip
def test_copies_for_computing_stay_from_forward_to_backward_except_in_stage_3(stage: int, elements: int) -> None:
    """Stage 0 needs most while a block's gradients are summed, when its copy and the head's have been given back, the
    next two at the loss, when what the head's came in is there as well."""
    keeps_much = {"activation_checkpointing": "none"}
    (rank,) = memories(plan_of(parallel={"data": 8, "zero_stage": stage}, training=keeps_much))
    assert rank.gathered_bytes == 2 * elements


def test_the_embeddings_copy_is_left_while_the_last_blocks_gradients_are_summed() -> None:
    """With full recomputation replicated states peak then, when the gradients of all blocks before it exist."""
    (rank,) = memories(plan_of(parallel={"data": 8}, training={"activation_checkpointing": "full"}))
    assert rank.gathered_bytes == 2 * HEAD_7B
    assert rank.gradients_bytes == 4 * (PARAMETERS_7B - BLOCK_7B - HEAD_7B)


@pytest.mark.parametrize("zero_group", [2, 4, 8])
def test_a_smaller_zero_group_shares_over_fewer_ranks(zero_group: int) -> None:
    (rank,) = memories(plan_of(parallel={"data": 8, "zero_stage": 3, "zero_group": zero_group}))
    assert rank.optimizer_bytes == pytest.approx(8 * PARAMETERS_7B / zero_group, rel=1e-6)


def test_states_on_the_host_leave_the_gpu_and_are_counted_there() -> None:
    config = plan_of(parallel={"data": 8, "zero_stage": 3, "offload": "all"})
    (rank,) = memories(config)
    assert rank.persistent_bytes == 0
    assert rank.host_bytes == pytest.approx(16 * PARAMETERS_7B / 8, rel=1e-6)
    (resident,) = memories(plan_of(parallel={"data": 8, "zero_stage": 3}))
    assert resident.host_bytes == 0
    assert (rank.total_bytes or 0) < (resident.total_bytes or 0)


@pytest.mark.parametrize("optimizer, moments", [
    ({"name": "adamw"}, 8), ({"name": "sgd", "momentum": 0.9}, 4), ({"name": "sgd"}, 0),
])  # fmt: skip
def test_the_optimizer_decides_its_own_state(optimizer: dict[str, Any], moments: int) -> None:
    (rank,) = memories(plan_of(parallel={"data": 8}, optimizer=optimizer))
    assert rank.optimizer_bytes == moments * PARAMETERS_7B


def _largest_chunk(length: int, parts: int) -> int:
    """Length of the first of `torch.chunk`'s parts."""
    return -(-length // parts)


def _brute_force(config: RunConfig, tensor: int, ranks: int, held: tuple[int, int], ends: tuple[bool, bool]) -> int:
    """Elements of the fullest rank, parameter by parameter."""
    total = 0
    for spec in parameter_specs(config.model):
        inside = spec.layer is not None and held[0] <= spec.layer < held[1]
        first = spec.part == "embedding" and ends[0]
        last = spec.part == "head" and ends[1] and not (spec.tied_to is not None and ends[0])
        if inside or first or last:
            shape = list(spec.shape)
            if spec.tensor_dim is not None:
                shape[spec.tensor_dim] = _largest_chunk(shape[spec.tensor_dim], tensor)
            shape[0] = _largest_chunk(shape[0], ranks)
            size = 1
            for length in shape:
                size *= length
            total += size
    return total


@cases.examples(40)
@given(
    family=st.sampled_from(["llama", "gpt"]),
    tied=st.booleans(),
    data=st.sampled_from([2, 4]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    vocabulary=st.sampled_from([256, 260, 1004]),
)
def test_states_equal_a_sum_over_every_parameter_with_uneven_cuts(
    family: str, tied: bool, data: int, tensor: int, pipeline: int, vocabulary: int
) -> None:
    changes = {"family": family, "tie_word_embeddings": tied, "vocab_size": vocabulary}
    parallel = {"data": data, "tensor": tensor, "pipeline": pipeline, "zero_stage": 3}
    config = cases.config(
        cases.TINY, model_changes=changes, parallel=parallel, cluster={"nodes": 8}, training={"micro_batch_size": 1}
    )
    facts = parallel_facts(derive(config))
    for rank, memory in enumerate(rank_memories(config, facts, BARE)):
        ends = (rank == 0, rank == pipeline - 1)
        elements = _brute_force(config, tensor, data, facts.stage_layers[rank], ends)
        assert memory.optimizer_bytes == 8 * elements


@cases.examples(60)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble"]),
    pipeline=st.sampled_from([1, 2, 4]),
    stage=st.integers(0, 3),
    tensor=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    profile=st.sampled_from(sorted(set(PROFILES) - {"deepspeed_estimator"})),
)
def test_categories_are_not_negative_and_add_up(
    schedule: str, pipeline: int, stage: int, tensor: int, recompute: str, profile: str
) -> None:
    if pipeline == 1:
        schedule = "1f1b"
    virtual = 2 if schedule in ("interleaved_1f1b", "zbv_zero_bubble") else 1
    parallel = {"pipeline": pipeline, "tensor": tensor, "zero_stage": stage, "schedule": schedule}
    config = cases.config(
        cases.TINY,
        parallel={**parallel, "virtual_stages": virtual},
        training={"activation_checkpointing": recompute, "micro_batch_size": 1},
    )
    for rank in memories(config, profile_named(profile)):
        sizes = [getattr(rank, f"{name}_bytes") for name in CATEGORIES]
        assert all(size >= 0 for size in sizes)
        assert rank.total_bytes == sum(sizes)
        assert rank.stages


def test_gpipe_keeps_every_micro_batch_and_1f1b_one_for_each_stage_still_ahead() -> None:
    def activations(schedule: str) -> list[int]:
        config = cases.config(
            cases.LLAMA_7B,
            parallel={"pipeline": 4, "data": 2, "schedule": schedule},
            training={"global_batch_size": 32, "activation_checkpointing": "none"},
        )
        return [rank.activations_bytes or 0 for rank in memories(config, replace(BARE, keeps_stage_outputs=False))]

    one = block_activations(work(plan_of(training={"activation_checkpointing": "none"})), BARE).kept
    first_f1b, first_gpipe = activations("1f1b")[0], activations("gpipe")[0]
    blocks = len(range(8))
    assert first_f1b == pytest.approx(4 * blocks * one, rel=0.05)
    # GPipe peaks after its first backward pass, when gradients exist beside all micro-batches but that one.
    assert first_gpipe == pytest.approx(15 * blocks * one, rel=0.05)
    assert activations("1f1b") == sorted(activations("1f1b"), reverse=True)


def test_more_recomputation_keeps_less_and_the_whole_block_is_worked_on_again() -> None:
    kept, working = [], []
    for recompute in ("none", "selective", "full"):
        block = block_activations(work(plan_of(training={"activation_checkpointing": recompute})), BARE)
        kept.append(block.kept)
        working.append(block.working)
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[1] > kept[2]
    assert working == sorted(working)
    stream, tables = 4096 * 4096 * 2, 4096 * 128 * 2
    assert kept[2] == stream + tables


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_sequence_parallelism_cuts_the_stream_that_tensor_parallelism_leaves_whole(tensor: int) -> None:
    def kept(split: bool) -> float:
        parallel = {"tensor": tensor, "data": 8 // tensor, "sequence_parallel": split}
        return block_activations(work(plan_of(parallel=parallel)), replace(BARE, casts_block_inputs=False)).kept

    assert kept(split=True) * tensor == pytest.approx(kept(split=False))


def test_only_the_rank_with_the_head_has_logits() -> None:
    config = cases.config(
        cases.LLAMA_7B,
        parallel={"pipeline": 4, "data": 2, "zero_stage": 2},
        training={"activation_checkpointing": "full"},
    )
    wide = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 512000})})
    logits = [rank.logits_bytes or 0 for rank in memories(wide)]
    assert logits[:-1] == [0, 0, 0]
    # Logits once in FP32 and once in BF16.
    assert logits[-1] == 4096 * 512000 * (4 + 2)


@pytest.mark.parametrize("tensor", [1, 8])
def test_the_head_holds_its_norms_input_and_output_and_the_outputs_gradient(tensor: int) -> None:
    parallel = {"data": 8 // tensor, "tensor": tensor, "sequence_parallel": tensor > 1}
    stream = 4096 * 4096 * 2
    # With sequence parallelism the norm works on a part, and its output is put together.
    put_together = stream if tensor > 1 else 0
    held = head_activations(work(plan_of(parallel=parallel)), OURS)
    assert held == 2 * stream / tensor + put_together + stream


def test_the_loss_of_a_long_micro_batch_is_computed_in_chunks_and_needs_the_memory_of_one() -> None:
    def logits(sequence: int) -> int:
        return round(logits_bytes(work(plan_of(training={"sequence_length": sequence})), OURS))

    # One chunk up to 4,096 tokens of this width; then chunks of 2,048 beside the weight's gradient in FP32.
    assert logits(2048) * 2 == logits(4096) == 4096 * 32000 * 6
    assert logits(16384) == logits(65536) == 32000 * (2048 * 6 + 4096 * 4)


def test_micro_batches_that_wait_for_their_backward_pass_keep_hidden_states_and_no_logits() -> None:
    def last(schedule: str) -> int:
        parallel = {"pipeline": 4, "data": 2, "schedule": schedule}
        last_stage = work(plan_of(parallel=parallel, training={"global_batch_size": 16}))
        return round(logits_bytes(last_stage, OURS) + head_activations(last_stage, OURS))

    assert last("gpipe") - last("1f1b") == 7 * 4096 * 4096 * 4


def test_a_tied_matrix_is_held_at_both_ends_of_a_pipeline_and_once_without_one() -> None:
    def optimizer(pipeline: int, tied: bool) -> list[int]:
        config = cases.config(
            cases.LLAMA_7B,
            model_changes={"tie_word_embeddings": tied},
            parallel={"pipeline": pipeline, "data": 8 // pipeline},
        )
        return [rank.optimizer_bytes for rank in memories(config)]

    matrix = 8 * 32000 * 4096
    assert optimizer(1, tied=False)[0] - optimizer(1, tied=True)[0] == matrix
    assert optimizer(2, tied=True) == optimizer(2, tied=False)


def test_a_checkpoint_holds_weights_and_moments_once_whatever_the_split() -> None:
    for parallel in ({"data": 8}, {"data": 2, "tensor": 4, "zero_stage": 3}):
        assert checkpoint_bytes(plan_of(parallel=parallel), OURS) == 12 * PARAMETERS_7B


@pytest.mark.parametrize("stage, recompute, measured_gib", [
    (3, "full", 14.93), (3, "none", 35.80), (2, "full", 24.36), (0, "full", 101.71),
])  # fmt: skip
def test_the_peak_is_near_what_a_tensor_tracker_counts(stage: int, recompute: str, measured_gib: float) -> None:
    """Tensors of LLaMA-7B on 8 ranks, as `dryrun` counts them with a CPU's kernels (stage 0 block by block)."""
    config = plan_of(
        parallel={"data": 8, "zero_stage": stage},
        cluster={"device": "cpu"},
        training={"activation_checkpointing": recompute},
    )
    by_block = replace(BARE, one_unit_on_cpu=False)
    assert max(rank.total_bytes or 0 for rank in memories(config, by_block)) / 2**30 == pytest.approx(
        measured_gib, rel=0.015
    )


def test_an_unknown_profile_is_named_with_those_that_exist() -> None:
    with pytest.raises(KeyError, match=r"'nobody' does not exist; there are ours, zero_paper"):
        profile_named("nobody")


def test_a_profile_without_a_precision_says_which_it_has() -> None:
    with pytest.raises(KeyError, match="no precision 'fp32'; it has fp16_mixed, bf16_mixed"):
        profile_named("megatron").bytes_of("fp32")


def test_memory_of_a_pipeline_of_many_ranks_comes_from_few_distinct_ones() -> None:
    config = cases.config(
        cases.LLAMA2_70B, parallel={"tensor": 8, "pipeline": 4}, cluster={"nodes": 16}, training={"micro_batch_size": 1}
    )
    ranks = memories_of(work(config), BARE)
    assert [rank.pipeline for rank in ranks] == [0, 1, 2, 3]
    assert ranks[1].optimizer_bytes == ranks[2].optimizer_bytes


def test_the_peak_of_the_plan_is_the_fullest_rank() -> None:
    plan = make_plan(cases.config(cases.LLAMA_7B, parallel={"pipeline": 2, "data": 4}))
    assert plan.memory is not None
    assert plan.memory.peak_bytes == max(rank.total_bytes or 0 for rank in plan.memory.pipeline_ranks)
