"""Published memory figures: ZeRO's table, the activation formula, the introductory article's figures for 7B and 70B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.plan.activations import block_activations
from orchestrator.plan.conventions import conventions
from orchestrator.plan.facts import derive
from orchestrator.plan.make import make_plan, parallel_facts
from orchestrator.plan.memory import kept_activations
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.states import StageElements, held_stages, state_memory
from orchestrator.plan.work import Recompute, Work, work_of
from tests.core import plan_cases as cases

GPT_175B = {
    "family": "gpt",
    "hidden_size": 12288,
    "intermediate_size": 49152,
    "num_hidden_layers": 96,
    "num_attention_heads": 96,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
}
GPT_530B = {**GPT_175B, "hidden_size": 20480, "intermediate_size": 81920, "num_hidden_layers": 105}
GPT_530B["num_attention_heads"] = 128


def states_gb(parameters: int, stage: int, ranks: int, precision: str = "fp16_mixed") -> float:
    """Model states of one GPU by the ZeRO paper's bytes, in 1e9 bytes."""
    elements = StageElements(whole=parameters, shared=-(-parameters // ranks), block=0, ends=0)
    memory = state_memory(
        elements,
        profile_named("zero_paper").bytes_of(precision),
        zero_stage=stage,
        master_gathered=False,
        offload=False,
    )
    return memory.persistent / 1e9


@pytest.mark.parametrize("billions, ranks, stage, printed, digits", [
    (7.5, 4, 1, 52.5, 1), (7.5, 4, 2, 41.3, 1), (7.5, 4, 3, 30, 0), (7.5, 64, 1, 31.4, 1), (7.5, 64, 2, 16.6, 1),
    (7.5, 64, 3, 1.88, 2), (7.5, 256, 1, 30.4, 1), (7.5, 256, 2, 15.4, 1), (128, 16, 1, 608, 0), (128, 16, 2, 368, 0),
    (128, 256, 3, 8, 0), (1000, 1024, 1, 4011, 0), (1000, 1024, 2, 2013, 0), (1000, 1024, 3, 15.6, 1),
])  # fmt: skip
def test_table_1_of_the_zero_paper_to_its_rounding(
    billions: float, ranks: int, stage: int, printed: float, digits: int
) -> None:
    """arXiv:1910.02054; the paper rounds some figures and truncates others."""
    assert abs(states_gb(round(billions * 1e9), stage, ranks) - printed) <= 10.0**-digits


def _interleaved(model: dict[str, object], pipeline: int, recompute: Recompute, split: bool) -> Work:
    config = cases.config(
        model,
        cluster={"nodes": pipeline},
        parallel={"tensor": 8, "pipeline": pipeline, "virtual_stages": 3, "schedule": "interleaved_1f1b"},
        training={"global_batch_size": 8 * pipeline, "precision": "fp16_mixed", "micro_batch_size": 1},
    )
    facts = parallel_facts(derive(config))
    return replace(work_of(config, facts), recompute=recompute, sequence_parallel=split)


@pytest.mark.parametrize("model, pipeline, recompute, split, printed_gib", [
    (GPT_175B, 8, "none", False, 66.84), (GPT_175B, 8, "attention", True, 12.35),
    (GPT_530B, 35, "none", False, 114.02), (GPT_530B, 35, "attention", True, 23.08),
])  # fmt: skip
def test_figure_1_of_the_recomputation_paper_to_a_tenth_of_a_gib(
    model: dict[str, object], pipeline: int, recompute: Recompute, split: bool, printed_gib: float
) -> None:
    """Korthikanti et al. 2022, arXiv:2205.05198: the first stage, interleaved over three stages a rank."""
    work, profile = _interleaved(model, pipeline, recompute, split), profile_named("megatron")
    stages = held_stages(work.parallel)[0]
    kept = kept_activations(work, profile, block_activations(work, profile), stages, 0)
    assert kept / 2**30 == pytest.approx(printed_gib, abs=0.1)


@pytest.mark.parametrize("parameters, half_gb, all_gb", [(7_000_000_000, 14, 56), (70_000_000_000, 140, 560)])
def test_round_parameter_counts_give_the_articles_figures(parameters: int, half_gb: float, all_gb: float) -> None:
    """14 and 140 GB of weights in 2 bytes; 8 bytes a parameter for all states in 2 bytes."""
    state = profile_named("zero_paper").bytes_of("bf16_pure")
    assert parameters * state.weights / 1e9 == half_gb
    assert states_gb(parameters, 0, 8, "bf16_pure") == all_gb


def test_real_parameter_counts_give_the_real_models_figures() -> None:
    plan = make_plan(cases.config(cases.LLAMA_7B, parallel={"data": 8}, training={"precision": "bf16_pure"}))
    assert plan.memory is not None
    rank = plan.memory.pipeline_ranks[0]
    assert round(rank.parameters_bytes / 1e9, 2) == 13.48
    assert round(rank.persistent_bytes / 1e9, 2) == 53.91
    assert (rank.parameters_bytes, rank.gradients_bytes, rank.optimizer_bytes) == tuple(
        6738415616 * size for size in (2, 2, 4)
    )
    seventy = make_plan(cases.config(cases.LLAMA2_70B, parallel={"data": 8}, training={"precision": "bf16_pure"}))
    assert seventy.memory is not None
    assert round(seventy.memory.pipeline_ranks[0].parameters_bytes / 1e9, 2) == 137.95
    assert not seventy.feasible


def test_training_70b_in_2_bytes_needs_over_500_gb_and_mixed_precision_twice_that() -> None:
    config = cases.config(cases.LLAMA2_70B, parallel={"data": 8})
    ours, paper, half = conventions(config, parallel_facts(derive(config)))
    assert half.model_bytes / 1e9 == pytest.approx(551.8, abs=0.1)
    assert paper.model_bytes == ours.model_bytes == 2 * half.model_bytes


def test_zero_2_on_8_gpus_by_each_convention() -> None:
    """The 20 to 25 GB of the article lie between all in 2 bytes and mixed precision."""
    config = cases.config(cases.LLAMA_7B, parallel={"data": 8, "zero_stage": 2})
    ours, paper, half = conventions(config, parallel_facts(derive(config)))
    assert round(half.gpu_bytes / 1e9, 1) == 18.5
    assert round(paper.gpu_bytes / 1e9, 1) == 25.3
    assert ours.gpu_bytes / 1e9 == pytest.approx(26.95, abs=0.01)
    assert half.gpu_bytes < 20e9 < 25e9 < paper.gpu_bytes


def test_replicated_llama_7b_with_fp32_master_weights_does_not_fit_80_gb_and_says_why() -> None:
    plan = make_plan(cases.config(cases.LLAMA_7B, parallel={"data": 8}))
    (problem,) = plan.problems
    assert problem.key == "cluster.gpu.memory_gib"
    assert "79.2 GiB" in problem.message and "optimizer 50.2 GiB" in problem.message


@pytest.mark.parametrize("stage, times_less", [(1, 2.5), (2, 7.9), (3, 7.9)])
def test_each_zero_stage_saves_about_what_the_article_says(stage: int, times_less: float) -> None:
    """4, 8 and N times less at many ranks; on 8 ranks with FP32 master weights, which FSDP shares from stage 1 on."""

    def kept(zero_stage: int) -> int:
        parallel = {"data": 8, "zero_stage": zero_stage}
        plan = make_plan(cases.config(cases.LLAMA_7B, parallel=parallel))
        assert plan.memory is not None
        return plan.memory.pipeline_ranks[0].persistent_bytes

    assert kept(0) / kept(stage) >= times_less


def test_the_paper_gives_4_8_and_n_times_less_on_64_gpus() -> None:
    whole = states_gb(7_000_000_000, 0, 64)
    savings = [whole / states_gb(7_000_000_000, stage, 64) for stage in (1, 2, 3)]
    assert savings == pytest.approx([3.8, 7.2, 64.0], abs=0.1)
