"""What follows a failure: a table of cases, walked without processes, clocks or Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.schema import FaultToleranceConfig
from orchestrator.launch.policy import Failure, PolicyState, RestartRanks, Retry, Stop, decide, restart_event


def fresh(**keys) -> PolicyState:
    return PolicyState.of(FaultToleranceConfig(**keys))


def fail(kind, step=7) -> Failure:
    return Failure(kind, step=step, time=1.0)


@pytest.mark.parametrize("kind", ["crash", "hang", "network"])
def test_ranks_that_die_or_hang_are_restarted_where_they_are(kind):
    decision = decide(fresh(), fail(kind))
    assert isinstance(decision, RestartRanks)
    assert decision.state.restarts == 1


@pytest.mark.parametrize("kind", ["node_loss", "attempt_failed", "placement"])
def test_a_lost_node_needs_nodes_chosen_anew(kind):
    decision = decide(fresh(), fail(kind))
    assert isinstance(decision, Retry)
    assert not decision.save_first


def test_a_preemption_notice_leaves_time_to_save_before_nodes_are_chosen_anew():
    decision = decide(fresh(), fail("preemption"))
    assert isinstance(decision, Retry)
    assert decision.save_first


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("user", "the same error would come again"), ("oom", "out of memory again"), ("nan", "fault_tolerance.on_nan")],
)
def test_what_would_come_again_ends_the_run_at_once(kind, reason):
    decision = decide(fresh(), fail(kind))
    assert isinstance(decision, Stop)
    assert reason in decision.reason


def test_a_rewind_starts_the_ranks_anew_and_leaves_the_step_out_from_then_on():
    once = decide(fresh(on_nan="rewind"), fail("nan", step=7))
    assert isinstance(once, RestartRanks)
    assert once.state.left_out == (7,)
    again = decide(once.state, fail("nan", step=5))
    assert again.state.left_out == (5, 7)


def test_rewinds_have_a_budget():
    state = fresh(on_nan="rewind", max_rewinds=1)
    state = decide(state, fail("nan", step=7)).state
    assert decide(state, fail("nan", step=8)) == Stop("it was rewound 1 time (fault_tolerance.max_rewinds=1)")


def test_the_same_step_failing_twice_in_a_row_is_a_crash_loop():
    once = decide(fresh(), fail("crash"))
    twice = decide(once.state, fail("hang"))
    assert twice == Stop("it failed twice in a row at step 7, without progress between")


def test_failing_twice_before_the_first_step_is_a_crash_loop():
    once = decide(fresh(), fail("crash", step=None))
    assert decide(once.state, fail("network", step=None)) == Stop(
        "it failed twice in a row before the first step, without progress between"
    )


def test_failing_at_another_step_is_no_crash_loop():
    once = decide(fresh(), fail("crash", step=7))
    assert isinstance(decide(once.state, fail("crash", step=8)), RestartRanks)


def test_nodes_lost_twice_at_one_step_are_no_crash_loop():
    once = decide(fresh(), fail("node_loss"))
    assert isinstance(decide(once.state, fail("node_loss")), Retry)


def test_a_crash_at_the_step_at_which_a_node_was_lost_is_no_crash_loop():
    once = decide(fresh(), fail("node_loss"))
    assert isinstance(decide(once.state, fail("crash")), RestartRanks)


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        ("crash", {"max_restarts": 2}, "it was restarted 2 times (fault_tolerance.max_restarts=2)"),
        ("hang", {"max_hangs": 2}, "it hung and was restarted 2 times (fault_tolerance.max_hangs=2)"),
        ("hang", {"max_restarts": 2}, "it hung and was restarted 2 times (fault_tolerance.max_hangs=2)"),
        ("node_loss", {"max_node_losses": 2},
         "it lost nodes and was placed again 2 times (fault_tolerance.max_node_losses=2)"),
        ("preemption", {"max_preemptions": 2}, "it was moved off nodes 2 times (fault_tolerance.max_preemptions=2)"),
    ],
)  # fmt: skip
def test_the_budget_of_each_class_is_spent_exactly(kind, keys, words):
    state = fresh(**keys)
    for step in (1, 2):
        state = decide(state, fail(kind, step)).state
    decision = decide(state, fail(kind, step=3))
    assert isinstance(decision, Stop)
    assert decision.reason == words


@pytest.mark.parametrize("spent", ["crash", "hang", "node_loss", "preemption"])
@pytest.mark.parametrize("kind", ["crash", "hang", "node_loss", "preemption"])
def test_a_spent_budget_leaves_those_of_other_classes_alone(spent, kind):
    state = fresh(max_restarts=1, max_preemptions=1)
    state = decide(state, fail(spent, step=1)).state
    assert isinstance(decide(state, fail(kind, step=2)), Stop) == (kind == spent)


def test_a_preemption_beyond_its_budget_still_saves():
    decision = decide(fresh(max_preemptions=0), fail("preemption"))
    assert isinstance(decision, Stop)
    assert decision.save_first


def test_without_a_budget_the_first_failure_ends_the_run():
    assert isinstance(decide(fresh(max_restarts=0), fail("crash")), Stop)


def test_nothing_is_restarted_while_the_run_is_being_stopped():
    decision = decide(replace(fresh(), stopping=True), fail("crash"))
    assert decision == Stop("it failed while it was being stopped")


def test_the_event_of_a_restart_names_its_class_and_how_far_its_budget_is_used():
    decision = decide(fresh(max_hangs=5), fail("hang"))
    event = restart_event(decision, "hang", "rank 1 is silent", attempt=1)
    assert (event["what"], event["cause"], event["budget"]) == ("ranks", "hang", "hang 1 of 5")


def test_the_readme_tells_what_follows_every_class_of_failure_by_its_key():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("### What happens when something fails") :]
    budgets = [key for key in FaultToleranceConfig.model_fields if key.startswith("max_")]
    assert budgets
    for key in (*budgets, "step_timeout_seconds", "replan_after_seconds", "preemption_file", "on_nan", "spike_factor"):
        assert f"`{key}`" in table, key
