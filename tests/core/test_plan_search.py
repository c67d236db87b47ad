"""The search: same answer as brute force, the article's order among ties, reasons for the rest, `auto`."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.schema import RunConfig
from orchestrator.plan.auto import chosen, fewest_nodes, largest_micro_batch
from orchestrator.plan.bounds import Bounds
from orchestrator.plan.evaluate import Evaluator
from orchestrator.plan.facts import derive
from orchestrator.plan.fit import gpu_shortage, host_shortage
from orchestrator.plan.make import make_plan
from orchestrator.plan.schedules import SPLIT_BACKWARDS
from orchestrator.plan.search import TIE, Found, Ranked, fits_somehow, ordered, search
from orchestrator.plan.search_space import (
    Candidate,
    Course,
    Split,
    asked_for,
    candidates,
    courses,
    overrides,
    splits,
)
from orchestrator.plan.validate import rules
from tests.core import plan_cases as cases

WIDE: dict[str, Any] = {**cases.LLAMA_7B, "num_hidden_layers": 8, "num_key_value_heads": 8}


@st.composite
def small_worlds(draw: st.DrawFn) -> RunConfig:
    """A wide, shallow model on 4 to 8 GPUs that hold some of its plans."""
    return cases.config(
        WIDE,
        model_changes={"vocab_size": draw(st.sampled_from([32000, 128256]))},
        cluster={
            "nodes": 2,
            "gpus_per_node": draw(st.sampled_from([2, 3, 4])),
            "gpu": {**cases.A100_80GB, "memory_gib": draw(st.sampled_from([8.0, 14.0, 20.0, 40.0]))},
        },
        training={
            "global_batch_size": draw(st.sampled_from([4, 6, 8])),
            "sequence_length": draw(st.sampled_from([1024, 4096])),
            "precision": draw(st.sampled_from(["bf16_mixed", "bf16_pure", "fp32"])),
            "compile": draw(st.booleans()),
        },
    )


def _peak(evaluate: Evaluator, candidate: Candidate) -> int | None:
    """Bytes of the fullest of all ranks where all fit."""
    memories = evaluate.memories(candidate)
    short = gpu_shortage(memories, evaluate.capacity_bytes) or host_shortage(memories, evaluate.config.cluster)
    return None if short else max(memory.total_bytes or 0 for memory in memories)


def _brute_force(config: RunConfig) -> Found:
    """Every candidate of the space, evaluated."""
    evaluate = Evaluator(config)
    found: dict[bool, list[Ranked]] = {False: [], True: []}
    for split, group in groupby(candidates(config), key=lambda candidate: candidate.split):
        plans = [
            Ranked(candidate, evaluate.seconds(candidate), evaluate.tight(peak))
            for candidate in group
            if (peak := _peak(evaluate, candidate)) is not None
        ]
        found[split.offload] += ordered(plans)[:1]
    return Found(ordered(found[False] or found[True]), ())


@cases.examples(6)
@given(small_worlds())
def test_the_pruned_search_finds_what_brute_force_finds(config: RunConfig) -> None:
    pruned, whole = search(config), _brute_force(config)
    assert pruned.ranked == whole.ranked
    kept_apart = bool(whole.ranked) and not whole.ranked[0].candidate.split.offload
    tried = [split for split in splits(config) if not (split.offload and kept_apart)]
    assert len(pruned.ranked) + len(pruned.rejected) == len(tried)
    bounds = Bounds(Evaluator(config))
    fitting = {plan.candidate.split for plan in pruned.ranked}
    assert {split for split in tried if fits_somehow(bounds, split)} == fitting


@cases.examples(40)
@given(small_worlds(), st.randoms(use_true_random=False))
def test_every_candidate_passes_the_rules_and_plans_to_the_same_bytes_and_seconds(
    config: RunConfig, random: Any
) -> None:
    evaluate = Evaluator(config)
    bounds = Bounds(evaluate)
    for _ in range(4):
        split = random.choice(list(splits(config)))
        candidate = Candidate(split, random.choice(list(courses(config, split))))
        asked = asked_for(config, candidate)
        assert rules.check(derive(asked)) == ()
        plan = make_plan(asked)
        assert plan.memory is not None
        assert plan.parallel == evaluate.facts(candidate)
        assert plan.memory.pipeline_ranks == evaluate.memories(candidate)
        assert plan.time.step_seconds == evaluate.seconds(candidate)
        assert plan.feasible == (evaluate.shortage(candidate) is None)
        assert evaluate.peak_where_it_fits(candidate) == (plan.memory.peak_bytes if plan.feasible else None)
        assert evaluate.mfu(candidate, plan.time.step_seconds or 0.0) == plan.time.mfu
        floor = bounds.floor_seconds(candidate)
        assert plan.time.step_seconds is not None
        assert 0 < floor <= plan.time.step_seconds


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("split", [Split(1, 4, 1, 1, 0, 1), Split(1, 2, 1, 2, 3, 2), Split(2, 2, 1, 1, 2, 1)])
def test_no_course_on_gpus_that_hold_it_just_so_is_taken_for_one_that_cannot_fit(batch: int, split: Split) -> None:
    # With short sequences the embedding counts as layers: of four ranks the first holds one of eight layers.
    config = cases.config(
        WIDE,
        model_changes={"vocab_size": 128256},
        cluster={"nodes": 1, "gpus_per_node": 4},
        training={"global_batch_size": split.data * batch, "sequence_length": 512},
    )
    roomy = Evaluator(_with_memory(config, 4000.0))
    for course in courses(config, split):
        peak = _peak(roomy, Candidate(split, course))
        assert peak is not None
        bounds = Bounds(Evaluator(_with_memory(config, (peak + 2**20) / 2**30)))
        bounded = next((each for each in bounds.courses(split) if each.course == course), None)
        assert bounded is not None
        assert bounds.may_fit(split, bounded), course


def _with_memory(config: RunConfig, gib: float) -> RunConfig:
    gpu = config.cluster.gpu.model_copy(update={"memory_gib": gib})
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu": gpu})})


def test_what_a_course_needs_at_least_does_not_depend_on_the_courses_asked_about_before() -> None:
    # A schedule that splits backward passes keeps whole gradients; others with as many layers on rank 0 share them.
    config = cases.config(
        WIDE,
        cluster={"nodes": 2, "gpus_per_node": 4, "gpu": {**cases.A100_80GB, "memory_gib": 7.0}},
        training={"global_batch_size": 16, "sequence_length": 1024},
    )
    split = Split(1, 2, 1, 4, 2, 4)
    bounds = Bounds(Evaluator(config))
    split_first = sorted(bounds.courses(split), key=lambda bounded: bounded.course.schedule not in SPLIT_BACKWARDS)
    found = [bounds.may_fit(split, bounded) for bounded in split_first]
    assert found == [Bounds(Evaluator(config)).may_fit(split, bounded) for bounded in split_first]


@pytest.mark.parametrize("field", ["model", "optimizer", "data", "checkpoint"])
def test_what_is_learned_is_never_varied(field: str) -> None:
    config = cases.config(WIDE, training={"global_batch_size": 8})
    for candidate in candidates(config):
        asked = asked_for(config, candidate)
        assert getattr(asked, field) == getattr(config, field)
        varied = {"micro_batch_size": 1, "activation_checkpointing": "none"}
        assert asked.training.model_copy(update=varied) == config.training.model_copy(update=varied)


def test_plans_are_ordered_by_time_and_ties_by_moving_parts_then_tensor_before_pipeline() -> None:
    course = Course("1f1b", 1, 1, "none")
    plain, zero2 = Split(1, 1, 1, 8, 0, 1), Split(1, 1, 1, 8, 2, 8)
    tensor, pipeline = Split(2, 1, 1, 4, 0, 1), Split(1, 2, 1, 4, 0, 1)
    wider = Split(4, 1, 1, 2, 0, 1)
    splits_by_preference = [plain, zero2, tensor, pipeline, wider]
    tied = [Ranked(Candidate(split, course), 10.0 + 0.9 * TIE * index) for index, split in enumerate([wider, pipeline])]
    tied += [Ranked(Candidate(split, course), 10.0) for split in (tensor, zero2, plain)]
    assert [plan.candidate.split for plan in ordered(tied)] == splits_by_preference
    brim = Ranked(Candidate(plain, course), 10.0, tight=True)
    assert ordered([brim, *tied])[-1] == brim
    faster = Ranked(Candidate(pipeline, course), 10.0 * (1 - 2 * TIE))
    assert ordered([*tied, faster])[0] == faster


def test_the_chosen_order_never_puts_a_plan_before_one_that_is_clearly_faster() -> None:
    ranked = search(cases.config(WIDE, cluster={"nodes": 2, "gpus_per_node": 4})).ranked
    times = [plan.step_seconds or 0.0 for plan in ranked]
    assert all(earlier <= later * (1 + 2 * TIE) for earlier, later in pairwise(times))


def test_a_rejected_split_says_which_rank_needs_how_much() -> None:
    found = search(cases.config(cases.LLAMA2_70B, cluster={"nodes": 2}))
    assert found.rejected
    full_copy = next(item for item in found.rejected if item.split == Split(1, 1, 1, 16, 0, 1))
    assert "pipeline rank 0 needs" in full_copy.reason
    assert "the card holds 79.2 GiB" in full_copy.reason


def test_7b_on_8_gpus_finds_zero_2_as_the_article_recommends() -> None:
    best = search(cases.config(cases.LLAMA_7B, training={"global_batch_size": 512})).ranked[0].candidate
    assert (best.split.tensor, best.split.pipeline, best.split.data) == (1, 1, 8)
    assert best.split.zero_stage == 2


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_70b_on_few_nodes_needs_more_than_data_parallelism_without_full_sharding(nodes: int) -> None:
    found = search(cases.config(cases.LLAMA2_70B, cluster={"nodes": nodes, "host_memory_gib": 1024}))
    for plan in found.ranked:
        split = plan.candidate.split
        assert split.zero_stage == 3 or split.tensor * split.pipeline > 1


def test_auto_takes_the_best_plan_and_planning_its_configuration_again_changes_nothing() -> None:
    config = cases.config(cases.LLAMA_7B, parallel={"strategy": "auto"})
    plan = make_plan(config)
    assert plan.feasible
    assert plan.config.parallel.strategy == "manual"
    assert chosen(plan)[0].startswith("parallel=auto: the best of")
    again = make_plan(plan.config)
    assert chosen(again) == ()
    assert (again.parallel, again.memory, again.time) == (plan.parallel, plan.memory, plan.time)


def test_auto_without_known_rates_keeps_to_the_simplest_plan_with_the_largest_micro_batch() -> None:
    cpu = {"device": "cpu", "gpus_per_node": 2, "gpu": {"name": "cpu", "memory_gib": 4}}
    training = {"global_batch_size": 8, "activation_checkpointing": "none"}
    plan = make_plan(cases.config(cluster=cpu, parallel={"strategy": "auto"}, training=training))
    assert plan.parallel is not None
    assert (plan.parallel.data, plan.parallel.zero_stage, plan.parallel.micro_batches) == (2, 0, 1)
    assert plan.time.step_seconds is None


def test_auto_refuses_what_no_split_could_mend_and_says_so_once() -> None:
    plan = make_plan(
        cases.config(parallel={"strategy": "auto"}, model_changes={"num_attention_heads": 5}, training={"steps": None})
    )
    assert {problem.key for problem in plan.problems} >= {"model.num_attention_heads", "training.steps"}
    assert not plan.feasible


def test_a_model_that_fits_in_no_plan_is_refused_with_the_nodes_it_needs() -> None:
    cluster = {"nodes": 1, "gpus_per_node": 8, "host_memory_gib": 512}
    plan = make_plan(cases.config(cases.LLAMA2_70B, cluster=cluster, parallel={"strategy": "auto"}))
    assert [problem.key for problem in plan.problems] == ["cluster.nodes"]
    nodes = fewest_nodes(cases.config(cases.LLAMA2_70B, cluster={**cluster, "nodes": "auto"}))
    assert nodes is not None
    assert f"cluster.nodes={nodes}" in plan.problems[0].fix


def test_the_fewest_nodes_hold_a_plan_and_one_node_less_holds_none() -> None:
    open_ended = {"nodes": "auto", "gpus_per_node": 4, "gpu": {**cases.A100_80GB, "memory_gib": 6.0}}
    config = cases.config(WIDE, cluster=open_ended, training={"global_batch_size": 24})
    nodes = fewest_nodes(config)
    assert nodes is not None
    assert nodes > 1

    def without_offload(count: int) -> list[Ranked]:
        ranked = search(
            cases.config(WIDE, cluster={**open_ended, "nodes": count}, training={"global_batch_size": 24})
        ).ranked
        return [plan for plan in ranked if not plan.candidate.split.offload]

    assert without_offload(nodes)
    assert not any(without_offload(count) for count in range(1, nodes))


def test_open_nodes_with_given_degrees_take_as_few_as_the_plan_needs() -> None:
    config = cases.config(cases.LLAMA2_70B, cluster={"nodes": "auto"}, parallel={"tensor": 8, "pipeline": 4, "data": 4})
    plan = make_plan(config)
    assert plan.feasible
    assert max(place.node for place in plan.ranks) == 15
    free = make_plan(cases.config(cases.LLAMA2_70B, cluster={"nodes": "auto"}, parallel={"tensor": 8, "pipeline": 4}))
    assert free.feasible
    assert free.config.cluster.nodes == 4


def test_the_largest_micro_batch_fits_and_the_next_one_does_not() -> None:
    evaluate = Evaluator(cases.config(cases.LLAMA_7B, training={"global_batch_size": 512}))
    candidate = Candidate(Split(1, 1, 1, 8, 2, 8), Course("1f1b", 1, 1, "full"))
    size = largest_micro_batch(evaluate, candidate)
    assert size > 1
    assert evaluate.shortage(replace(candidate, course=candidate.course.with_size(size))) is None
    assert evaluate.shortage(replace(candidate, course=candidate.course.with_size(2 * size))) is not None


def test_a_candidate_can_be_typed() -> None:
    config = cases.config(cases.LLAMA_7B)
    words = overrides(config, Candidate(Split(2, 1, 1, 4, 3, 4), Course("1f1b", 1, 2, "full")))
    assert words == (
        "parallel.data=4",
        "parallel.tensor=2",
        "parallel.zero_stage=3",
        "parallel.sequence_parallel=true",
        "training.micro_batch_size=2",
        "training.activation_checkpointing=full",
    )
