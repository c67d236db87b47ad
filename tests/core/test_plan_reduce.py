"""A reduction is small and still the plan: what must stay stays, over the shipped experiments and over random plans."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from models.spec import key_value_heads
from orchestrator.config import locate
from orchestrator.config.compose import load_config
from orchestrator.config.schema import RunConfig
from orchestrator.plan.make import make_plan
from orchestrator.plan.reduce import MOST_PROCESSES, Axes, Reduction, axes_of, reduced_axes, reductions
from orchestrator.plan.run_plan import RunPlan

AXES = ("pipeline", "replicate", "shard", "tensor")
RANDOM_PLANS = 150


def draw(rng: random.Random) -> RunConfig:
    """Any configuration, legal or not, of up to thousands of ranks."""
    schedule = rng.choice(
        ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
    )
    degrees = {name: rng.choice((1, 1, 2, 3, 4, 8, 16)) for name in ("pipeline", "data", "tensor")}
    family = rng.choice(("llama", "gpt"))
    groups = rng.choice((8, 16, 32, 48)) if family == "llama" else None
    virtual = 1 if schedule in ("gpipe", "1f1b") or degrees["pipeline"] == 1 else rng.choice((1, 2, 2, 2, 3, 4))
    stage = rng.choice((0, 1, 2, 3))
    window = rng.choice((None, 64, 100_000)) if family == "llama" else None
    values: dict[str, Any] = {
        "model": {
            "family": family,
            "hidden_size": 96 * 64,
            "intermediate_size": rng.choice((48 * 300, 96 * 512)),
            "num_hidden_layers": rng.choice((16, 48, 61, 96)),
            "num_attention_heads": 96,
            "num_key_value_heads": groups,
            "head_dim": rng.choice((None, 64, 128)) if family == "llama" else None,
            "vocab_size": rng.choice((32000, 50257)),
            "max_position_embeddings": rng.choice((480, 4096)),
            "sliding_window": window,
            "tie_word_embeddings": rng.random() < 0.5,
        },
        "cluster": {"device": "cuda", "nodes": "auto", "gpus_per_node": 16, "gpu": {"name": "G", "memory_gib": 50_000}},
        "parallel": {
            **degrees,
            "virtual_stages": virtual,
            "schedule": schedule,
            "zero_stage": stage,
            "zero_group": rng.choice(("auto", 1, 2, 4)) if stage else "auto",
            "offload": rng.choice(("none", "none", "all")),
            "sequence_parallel": rng.random() < 0.5,
        },
        "training": {
            "sequence_length": 480,
            "global_batch_size": rng.choice((96, 768, 2304)),
            "micro_batch_size": rng.choice((1, 2, 3)),
            "steps": 10,
            "precision": rng.choice(("fp32", "bf16_mixed", "bf16_pure", "fp16_mixed")),
            "activation_checkpointing": rng.choice(("none", "selective", "full")),
            "gradient_clip": rng.choice((None, 1.0)),
        },
        "optimizer": {"name": rng.choice(("adamw", "sgd"))},
    }
    return RunConfig.model_validate(values)


@cache
def random_plans() -> tuple[RunPlan, ...]:
    rng, found = random.Random(5), []
    while len(found) < RANDOM_PLANS:
        plan = make_plan(draw(rng))
        if plan.feasible:
            found.append(plan)
    return tuple(found)


def plans() -> list[RunPlan]:
    shipped = [make_plan(load_config([f"+experiment={name}"])) for name in locate.options("experiment")]
    return [*shipped, *random_plans()]


@cache
def reduced() -> tuple[tuple[RunPlan, tuple[Reduction, ...]], ...]:
    return tuple((plan, reductions(plan)) for plan in plans())


def each() -> list[tuple[RunPlan, Reduction]]:
    return [(plan, one) for plan, found in reduced() for one in found]


def test_every_reduction_is_feasible_on_at_most_8_processes() -> None:
    assert all(one.plan.feasible and len(one.plan.ranks) == one.axes.world_size <= MOST_PROCESSES for _, one in each())


def test_every_axis_above_1_stays_above_1_and_meets_every_other_one() -> None:
    for plan, found in reduced():
        assert plan.parallel is not None
        split = {name for name in AXES if getattr(axes_of(plan.parallel), name) > 1}
        met = [{name for name in AXES if getattr(one.axes, name) > 1} for one in found]
        assert set().union(*met) == split
        assert all(any(set(pair) <= one for one in met) for pair in combinations(split, 2))
        assert len(found) == (1 if len(split) < 4 else 3)


def test_the_random_plans_reach_all_numbers_of_axes_and_all_schedules() -> None:
    axes = [axes_of(plan.parallel) for plan in random_plans() if plan.parallel is not None]
    assert {sum(getattr(one, name) > 1 for name in AXES) for one in axes} == {0, 1, 2, 3, 4}
    staged = {plan.config.parallel.schedule for plan in random_plans() if plan.config.parallel.pipeline > 1}
    assert len(staged) == 6


KEPT = (
    "parallel.zero_stage", "parallel.schedule", "parallel.offload", "parallel.sequence_parallel", "model.family",
    "model.tie_word_embeddings", "model.attention_bias", "training.activation_checkpointing", "optimizer.name",
    "optimizer.weight_decay", "training.seed",
)  # fmt: skip


@pytest.mark.parametrize("key", KEPT)
def test_what_makes_the_plan_is_kept(key: str) -> None:
    section, field = key.split(".")
    for plan, one in each():
        assert getattr(getattr(one.plan.config, section), field) == getattr(getattr(plan.config, section), field)


def test_accumulation_grouped_queries_virtual_stages_clipping_and_hybrid_groups_are_kept() -> None:
    for plan, one in each():
        asked, small = plan.parallel, one.plan.parallel
        assert asked is not None and small is not None
        assert (small.micro_batches > 1) == (asked.micro_batches > 1)
        assert (one.plan.config.training.micro_batch_size > 1) == (plan.config.training.micro_batch_size > 1)
        before, after = plan.config.model, one.plan.config.model
        assert (key_value_heads(after) < after.num_attention_heads) == (
            key_value_heads(before) < before.num_attention_heads
        )
        assert (one.plan.config.training.gradient_clip is None) == (plan.config.training.gradient_clip is None)
        if small.pipeline > 1:
            assert (small.virtual_stages > 1) == (asked.virtual_stages > 1)
        if small.replicate > 1 and asked.zero_stage > 0:
            assert (small.zero_group > 1) == (asked.zero_group > 1)


def test_an_uneven_cut_stays_uneven_and_an_even_one_even() -> None:
    for plan, one in each():
        if one.axes.pipeline > 1:
            asked, small = (
                {end - first for first, end in parallel.stage_layers}
                for parallel in (plan.parallel, one.plan.parallel)
                if parallel is not None
            )
            assert (len(small) > 1) == (len(asked) > 1)


def test_a_vocabulary_that_tensor_ranks_cut_unevenly_stays_one() -> None:
    for plan, one in each():
        if one.axes.tensor > 1:
            uneven = plan.config.model.vocab_size % plan.config.parallel.tensor != 0
            assert (one.plan.config.model.vocab_size % one.axes.tensor != 0) == uneven


def test_a_window_shorter_than_the_sequence_stays_shorter() -> None:
    for plan, one in each():
        asked, small = plan.config, one.plan.config
        if asked.model.sliding_window is not None:
            assert small.model.sliding_window is not None
            assert (small.model.sliding_window < small.training.sequence_length) == (
                asked.model.sliding_window < asked.training.sequence_length
            )


def test_the_precision_is_told_and_every_width_that_changed() -> None:
    for plan, one in each():
        assert one.precision == plan.config.training.precision
        told = {change.key: (change.asked, change.reduced) for change in one.changes}
        assert told["model.hidden_size"] == (plan.config.model.hidden_size, one.plan.config.model.hidden_size)
        if one.axes.tensor != plan.config.parallel.tensor:
            assert told["parallel.tensor"] == (plan.config.parallel.tensor, one.axes.tensor)


@pytest.mark.parametrize(
    ("asked", "reduced"),
    [
        (Axes(1, 1, 1, 1), [Axes(1, 1, 1, 1)]),
        (Axes(2, 1, 2, 2), [Axes(2, 1, 2, 2)]),
        (Axes(1, 3, 1, 1), [Axes(1, 3, 1, 1)]),
        (Axes(4, 1, 4, 8), [Axes(2, 1, 2, 2)]),
        (Axes(1, 1, 8, 8), [Axes(1, 1, 4, 2)]),
        (Axes(1, 64, 1, 1), [Axes(1, 8, 1, 1)]),
        (Axes(1, 7, 1, 1), [Axes(1, 7, 1, 1)]),
        (Axes(1, 11, 1, 1), [Axes(1, 2, 1, 1)]),
        (Axes(1, 6, 1, 2), [Axes(1, 3, 1, 2)]),
        (Axes(4, 2, 4, 8), [Axes(2, 1, 2, 2), Axes(2, 2, 2, 1), Axes(1, 2, 2, 2)]),
    ],
)
def test_degrees_stay_as_they_are_where_they_fit_and_become_as_large_and_even_as_8_processes_hold(
    asked: Axes, reduced: list[Axes]
) -> None:
    assert list(reduced_axes(asked)) == reduced


def test_a_plan_of_four_split_axes_keeps_only_legal_settings_where_it_has_lost_an_axis() -> None:
    words = [
        "+experiment=llama70b_3d", "parallel.tensor=2", "parallel.pipeline=2", "parallel.zero_stage=3",
        "parallel.zero_group=16", "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2",
    ]  # fmt: skip
    plan = make_plan(load_config(words))
    assert plan.feasible, plan.problems
    found = reductions(plan)
    assert [one.axes for one in found] == [Axes(2, 1, 2, 2), Axes(2, 2, 2, 1), Axes(1, 2, 2, 2)]
    assert [one.plan.config.parallel.virtual_stages for one in found] == [2, 2, 1]
    assert [one.plan.config.parallel.zero_group for one in found] == ["auto", 2, 2]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (Axes(1, 1, 1, 1), "1 process"),
        (Axes(2, 1, 4, 1), "pipeline 2 x data 4"),
        (Axes(1, 8, 1, 1), "data 8"),
        (Axes(1, 2, 2, 2), "replicate 2 x shard 2 x tensor 2"),
    ],
)
def test_axes_are_told_in_the_words_of_the_configuration(axes: Axes, words: str) -> None:
    assert axes.describe() == words
