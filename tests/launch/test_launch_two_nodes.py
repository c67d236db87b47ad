"""Runs on a real Ray cluster of two nodes: placed, mended in place, moved when a share is lost, stopped when asked."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from orchestrator.errors import PlacementError
from tests.launch.plans import cpu_plan

pytestmark = pytest.mark.ray


def steps_of(told) -> list[int]:
    return [event["step"] for event in told.of("step")]


def test_four_ranks_on_two_nodes_run_to_their_end(start):
    told = start(cpu_plan(nodes=2, slots=2, tensor=2))
    assert told.outcome.status == "finished"
    assert told.outcome.problems == ()
    assert steps_of(told) == [1, 2, 3]
    assert {rank: result["steps"] for rank, result in told.outcome.rank_results.items()} == {0: 3, 1: 3, 2: 3, 3: 3}
    placed = told.outcome.placement
    assert [entry.node_id == placed[0].node_id for entry in placed] == [True, True, False, False]
    assert [entry.tensor for entry in placed] == [0, 1, 0, 1]
    (ready,) = told.of("ready")
    assert [rank["node_id"] for rank in ready["ranks"]] == [entry.node_id for entry in placed]
    assert [name for name, _ in told.outcome.timings][:3] == ["imports", "ray", "workers"]


def test_a_killed_rank_is_replaced_in_place_and_all_go_on_from_what_was_saved(start):
    told = start(cpu_plan(nodes=2, slots=2), act="die", rank=3, step=2)
    assert told.outcome.status == "finished"
    assert steps_of(told) == [1, 2, 3]
    first, second = told.outcome.attempts
    assert (first.cause, first.first_step, first.last_step) == ("crash", 1, 1)
    assert (second.cause, second.first_step, second.last_step) == ("finished", 2, 3)
    assert second.recovery_seconds is not None
    (restart,) = told.of("restart")
    assert restart["what"] == "ranks"
    assert "rank 3" in restart["message"]
    assert "killed by SIGKILL" in restart["message"]
    assert len(told.of("recovered")) == 1


def test_a_users_error_ends_the_run_at_once_and_is_one_message(start):
    told = start(cpu_plan(nodes=2, slots=2), act="user_error", rank=2)
    assert told.outcome.status == "failed"
    assert len(told.outcome.attempts) == 1
    (problem,) = told.outcome.problems
    assert "rank 2" in problem.message
    assert "ValueError: the sequence is longer than the model can take" in problem.message
    assert "Connection closed" not in problem.message
    assert "_act" in told.outcome.traceback


def test_a_hang_is_named_with_rank_phase_and_step_and_mended(start):
    told = start(cpu_plan(nodes=2, slots=2, step_timeout_seconds=1.5), act="freeze", rank=1, step=3)
    assert told.outcome.status == "finished"
    (restart,) = told.of("restart")
    assert restart["cause"] == "hang"
    assert "rank 1" in restart["message"]
    assert "stepping, step 3: no progress for" in restart["message"]
    assert "its process is stopped" in restart["message"]
    assert steps_of(told) == [1, 2, 3]


def test_the_same_step_failing_twice_ends_the_run(start):
    told = start(cpu_plan(nodes=2, slots=2), act="crash", step=2, always=1)
    assert told.outcome.status == "failed"
    assert len(told.outcome.attempts) == 2
    assert "it failed twice in a row at step 2" in told.outcome.problems[0].message


def test_a_lost_supervisor_means_a_new_attempt_on_nodes_chosen_anew(start):
    killed = []

    def kill_supervisor(event):
        if event["kind"] == "step" and event["step"] == 2 and not killed:
            rank = psutil.Process(ranks[0])
            keeper = rank.parent()
            supervisor = keeper.parent().parent()
            killed.append(supervisor.pid)
            supervisor.kill()
        elif event["kind"] == "ready":
            ranks[:] = [rank["pid"] for rank in event["ranks"]]

    ranks: list[int] = []
    told = start(cpu_plan(nodes=2, slots=2), on_event=kill_supervisor, steps=400, step_seconds=0.02)
    assert killed
    assert told.outcome.status == "finished"
    assert [restart["what"] for restart in told.of("restart")] == ["attempt"]
    assert [attempt.cause for attempt in told.outcome.attempts] == ["share_lost", "finished"]
    assert told.outcome.attempts[1].last_step == 400


def test_one_ctrl_c_saves_at_the_next_step_and_stops(start):
    def interrupt(event):
        if event["kind"] == "step" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    told = start(cpu_plan(nodes=2, slots=2), on_event=interrupt, steps=100000, step_seconds=0.02)
    assert told.outcome.status == "stopped"
    assert told.outcome.problems == ()
    assert [event["signal"] for event in told.of("stopping")] == ["SIGINT"]
    assert told.outcome.attempts[0].last_step == steps_of(told)[-1] < 100000
    assert len({result["steps"] for result in told.outcome.rank_results.values()}) == 1


def test_a_second_ctrl_c_ends_all_at_once_and_says_what_is_kept(start):
    def interrupt(event):
        if (event["kind"] == "step" and event["step"] == 3) or event["kind"] == "stopping":
            os.kill(os.getpid(), signal.SIGINT)

    told = start(cpu_plan(nodes=2, slots=2), on_event=interrupt, steps=100000, step_seconds=5, act="none")
    assert told.outcome.status == "stopped"
    (problem,) = told.outcome.problems
    assert "SIGINT came a second time" in problem.message
    assert "checkpoint of step" in problem.fix


def test_ranks_that_do_not_stop_in_time_are_ended_and_it_is_said(start):
    def terminate(event):
        if event["kind"] == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    told = start(cpu_plan(nodes=2, slots=2, grace_seconds=1), on_event=terminate, act="hang", rank=1, step=1)
    assert told.outcome.status == "stopped"
    assert "did not save and stop within 1 s (fault_tolerance.grace_seconds)" in told.outcome.problems[0].message


def test_a_plan_that_can_never_fit_is_refused_with_the_arithmetic_before_anything_starts(start):
    with pytest.raises(PlacementError, match="needs 6 CPU slots; 2 nodes hold 2 \\+ 2"):
        start(cpu_plan(nodes=3, slots=2))


def test_a_plan_that_only_does_not_fit_now_waits_with_a_reason_and_a_limit(start):
    from orchestrator.launch.session import ray_session

    reasons = []
    plan = cpu_plan(nodes=2, slots=2, placement_timeout_seconds=1)
    with ray_session(plan) as ray:

        @ray.remote(num_cpus=1)
        class Other:
            def here(self):
                return True

        other = Other.remote()
        assert ray.get(other.here.remote())
        from orchestrator.launch.inventory import read_nodes
        from orchestrator.launch.ray_attempt import RayAttempt
        from orchestrator.launch.request import LaunchRequest
        from orchestrator.launch.waiting import PlacementWait

        wait = PlacementWait(plan, 1)
        attempt = RayAttempt(LaunchRequest(plan, "/nowhere", 0.0), None, 1, {})
        assert sorted(node.slots_free for node in read_nodes(ray, "cpu")) == [1, 2]
        assert not wait.attempt(100.0, ray, attempt, reasons.append)
        with pytest.raises(PlacementError, match="Others hold the rest now"):
            wait.attempt(101.5, ray, attempt, reasons.append)
    assert [reason["kind"] for reason in reasons] == ["waiting"]
    assert "needs 4 CPU slots; 2 nodes hold" in reasons[0]["reason"]
