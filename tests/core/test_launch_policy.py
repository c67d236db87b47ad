"""What follows a failure: a table of cases, walked without processes, clocks or Ray."""

from __future__ import annotations

import pytest

from orchestrator.launch.policy import Failure, PolicyState, RestartRanks, Retry, Stop, decide

FRESH = PolicyState(max_restarts=3)


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_ranks_that_die_or_hang_are_restarted_where_they_are(kind):
    assert decide(FRESH, Failure(kind, step=7, time=1.0)) == RestartRanks(
        PolicyState(max_restarts=3, restarts=1, last_failed_step=7)
    )


@pytest.mark.parametrize("kind", ["share_lost", "attempt_failed", "placement"])
def test_a_lost_share_needs_nodes_chosen_anew(kind):
    assert isinstance(decide(FRESH, Failure(kind, step=7, time=1.0)), Retry)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("user", "the same error would come again"), ("oom", "out of memory again"), ("nan", "fault_tolerance.on_nan")],
)
def test_what_would_come_again_ends_the_run_at_once(kind, reason):
    decision = decide(FRESH, Failure(kind, step=7, time=1.0))
    assert isinstance(decision, Stop)
    assert reason in decision.reason


def test_the_same_step_failing_twice_in_a_row_is_a_crash_loop():
    once = decide(FRESH, Failure("crash", step=7, time=1.0))
    twice = decide(once.state, Failure("hang", step=7, time=2.0))
    assert twice == Stop("it failed twice in a row at step 7, without progress between")


def test_failing_twice_before_the_first_step_is_a_crash_loop():
    once = decide(FRESH, Failure("crash", step=None, time=1.0))
    assert decide(once.state, Failure("crash", step=None, time=2.0)) == Stop(
        "it failed twice in a row before the first step, without progress between"
    )


def test_failing_at_another_step_is_no_crash_loop():
    once = decide(FRESH, Failure("crash", step=7, time=1.0))
    assert isinstance(decide(once.state, Failure("crash", step=8, time=2.0)), RestartRanks)


def test_nodes_lost_twice_at_one_step_are_no_crash_loop():
    once = decide(FRESH, Failure("share_lost", step=7, time=1.0))
    assert isinstance(decide(once.state, Failure("share_lost", step=7, time=2.0)), Retry)


def test_the_budget_of_restarts_is_spent_exactly():
    state = PolicyState(max_restarts=2)
    for step in (1, 2):
        state = decide(state, Failure("crash", step=step, time=1.0)).state
    assert decide(state, Failure("crash", step=3, time=1.0)) == Stop(
        "it was restarted 2 times (fault_tolerance.max_restarts=2)"
    )


def test_without_a_budget_the_first_failure_ends_the_run():
    assert isinstance(decide(PolicyState(max_restarts=0), Failure("crash", step=3, time=1.0)), Stop)


def test_nothing_is_restarted_while_the_run_is_being_stopped():
    decision = decide(PolicyState(max_restarts=3, stopping=True), Failure("crash", step=3, time=1.0))
    assert decision == Stop("it failed while it was being stopped")
