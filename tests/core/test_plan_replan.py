"""A plan for the nodes that remain, and the next plan after memory ran out."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import load_config, make_plan
from orchestrator.errors import PlanError
from orchestrator.plan.after_oom import excess, next_plan_words, worst_category
from orchestrator.plan.batch import divisors
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.replan import replan
from orchestrator.plan.run_plan import RunPlan

EXPERIMENTS = ("llama7b_zero2", "llama7b_zero3", "llama7b_3d", "llama70b_3d", "llama3_8b", "llama3_405b")
PLANS: dict[str, RunPlan] = {name: make_plan(load_config([f"+experiment={name}"])) for name in EXPERIMENTS}

LEARNED = ("sequence_length", "global_batch_size", "steps", "tokens", "precision", "gradient_clip", "seed")


def test_one_node_of_sixteen_gone_halves_the_data_degree_of_the_70b_plan_and_names_what_is_idle():
    found = replan(PLANS["llama70b_3d"], [8] * 15)
    assert found.changes == ("parallel.data 4 -> 2", "micro-batches a step 256 -> 512", "parallel.zero_group 4 -> 2")
    assert found.idle == 15 * 8 - 64
    assert found.plan.parallel.world_size == 64


def test_the_degree_is_the_largest_that_divides_the_batch_not_the_nearest_power():
    config = load_config(["cluster.gpus_per_node=4", "training.global_batch_size=12", "training.micro_batch_size=3"])
    found = replan(make_plan(config), [3])
    assert (found.plan.parallel.data, found.plan.config.training.micro_batch_size, found.idle) == (3, 2, 0)
    assert "training.micro_batch_size 3 -> 2" in found.changes


def test_a_sharding_group_that_no_longer_divides_becomes_the_largest_that_does():
    config = load_config(
        ["cluster.gpus_per_node=4", "parallel=zero3", "parallel.zero_group=2", "training.global_batch_size=12",
         "training.micro_batch_size=1"]
    )  # fmt: skip
    assert replan(make_plan(config), [3]).plan.parallel.zero_group == 1


def test_too_few_nodes_for_one_copy_are_refused_with_the_arithmetic():
    with pytest.raises(PlanError, match=r"takes 32 slots \(4 TP groups of 8\); 3 remaining nodes hold 8 \+ 8 \+ 7 = 2"):
        replan(PLANS["llama70b_3d"], [8, 8, 7])


@functools.cache
def largest_legal(name: str, most: int) -> int | None:
    """By asking for every degree, micro-batch and recomputation on the command line."""
    plan = PLANS[name]
    asked = plan.config.training
    levels = ("none", "selective", "full")
    for data in reversed([d for d in divisors(asked.global_batch_size) if d <= min(plan.parallel.data, most)]):
        for size in [s for s in divisors(asked.global_batch_size // data) if s <= asked.micro_batch_size]:
            for level in levels[levels.index(asked.activation_checkpointing) :]:
                words = [f"parallel.data={data}", "parallel.zero_group=auto", f"training.micro_batch_size={size}"]
                words += [f"training.activation_checkpointing={level}"]
                tried = make_plan(load_config([f"+experiment={name}", *words]))
                if tried.feasible and not engine_problems(tried):
                    return data
    return None


@settings(max_examples=60)
@given(st.sampled_from(EXPERIMENTS[:5]), st.lists(st.integers(0, 8), max_size=18))
def test_whatever_remains_gives_the_largest_legal_plan_that_learns_the_same_or_a_true_refusal(name, free):
    plan = PLANS[name]
    before = plan.parallel
    groups = sum(slots // before.tensor for slots in free)
    per_rank = before.pipeline * before.context
    try:
        found = replan(plan, free)
    except PlanError:
        assert largest_legal(name, groups // per_rank) is None
        return
    after = found.plan
    assert after.feasible
    assert not engine_problems(after)
    for key in LEARNED:
        assert getattr(after.config.training, key) == getattr(plan.config.training, key)
    assert (after.config.model, after.config.optimizer) == (plan.config.model, plan.config.optimizer)
    parallel, training = after.parallel, after.config.training
    assert (parallel.tensor, parallel.pipeline, parallel.context) == (before.tensor, before.pipeline, before.context)
    assert training.micro_batch_size * parallel.micro_batches * parallel.data == training.global_batch_size
    assert parallel.world_size <= groups * before.tensor
    assert found.idle == sum(free) - parallel.world_size
    assert parallel.data == largest_legal(name, groups // per_rank)


def test_the_plan_of_what_remains_reaches_its_number_of_ranks_with_the_declared_nodes():
    found = replan(PLANS["llama7b_3d"], [8] * 7)
    assert found.plan.config.cluster.nodes * 8 >= found.plan.parallel.world_size
    assert len(found.plan.ranks) == found.plan.parallel.world_size


def test_the_category_that_exceeded_its_plan_most_is_the_worst():
    assert worst_category({"parameters": 10, "activations": 70}, {"parameters": 10, "activations": 40}) == "activations"
    assert worst_category({"parameters": 10}, {"parameters": 10}) is None
    assert worst_category({}, {}) is None


def test_without_measurements_the_excess_is_what_it_takes_to_overfill_the_card():
    plan = PLANS["llama7b_zero2"]
    factor = excess(plan, {}, {})
    assert plan.memory.peak_bytes * factor > plan.memory.capacity_bytes


def test_the_next_plan_that_fits_is_named_and_fits_with_the_same_excess():
    plan = PLANS["llama7b_zero2"]
    words = next_plan_words(plan, 1.9)
    assert words.startswith("The next plan that fits: ")
    overrides = words.removeprefix("The next plan that fits: ").split(" (")[0].split()
    other = make_plan(load_config(["+experiment=llama7b_zero2", *overrides]))
    assert other.feasible
    assert other.memory.peak_bytes * 1.9 <= other.memory.capacity_bytes


def test_when_nothing_fits_with_that_excess_it_is_said():
    assert next_plan_words(PLANS["llama70b_3d"], 1000.0).startswith("No plan of this model on these GPUs")
