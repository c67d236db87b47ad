"""Runs on a real Ray cluster of two nodes: placed, mended in place, moved when a share is lost, stopped when asked."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from orchestrator.errors import PlacementError
from tests.launch.conftest import start_toy
from tests.launch.plans import cpu_plan

pytestmark = pytest.mark.ray


def steps_of(told) -> list[int]:
    return [event["step"] for event in told.of("step")]


def test_four_ranks_on_two_nodes_run_to_their_end(start, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told = start(cpu_plan(nodes=2, slots=2, tensor=2))
    assert told.outcome.status == "finished"
    assert told.outcome.problems == ()
    assert steps_of(told) == [1, 2, 3]
    assert {rank: result["steps"] for rank, result in told.outcome.rank_results.items()} == {0: 3, 1: 3, 2: 3, 3: 3}
    wanted = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "lo"}
    assert all(wanted.items() <= result["network"].items() for result in told.outcome.rank_results.values())
    placed = told.outcome.placement
    assert [entry.node_id == placed[0].node_id for entry in placed] == [True, True, False, False]
    assert [entry.tensor for entry in placed] == [0, 1, 0, 1]
    (ready,) = told.of("ready")
    assert [rank["node_id"] for rank in ready["ranks"]] == [entry.node_id for entry in placed]
    assert [name for name, _ in told.outcome.timings][:4] == ["imports", "ray", "nodes", "workers"]


@pytest.mark.slow
def test_the_same_step_failing_twice_ends_the_run(start):
    told = start(cpu_plan(nodes=2, slots=2), act_1="crash:1:2", act_2="crash:0:2")
    assert told.outcome.status == "failed"
    assert len(told.outcome.attempts) == 2
    assert "it failed twice in a row at step 2" in told.outcome.problems[0].message


@pytest.fixture(scope="module")
def troubled(two_nodes, tmp_path_factory):
    """One run with a killed rank, a frozen one, a lost supervisor and Ctrl-C at last: launching is what costs time."""
    pids: list[int] = []
    done: set[str] = set()

    def interfere(event):
        if event["kind"] == "ready":
            pids[:] = [rank["pid"] for rank in event["ranks"]]
        elif event["kind"] == "step" and event["attempt"] == 3 and event["step"] == 9:
            keeper = psutil.Process(pids[0]).parent()
            keeper.parent().parent().kill()  # keeper, warm process, supervisor
        elif event["kind"] == "step" and event["attempt"] == 4 and "ctrl-c" not in done:
            done.add("ctrl-c")
            os.kill(os.getpid(), signal.SIGINT)

    plan = cpu_plan(nodes=2, slots=2, step_timeout_seconds=1.5)
    folder = tmp_path_factory.mktemp("troubled")
    return start_toy(
        two_nodes,
        folder,
        plan,
        interfere,
        {"STEPS": 100_000, "STEP_SECONDS": 0.02, "ACT_1": "die:3:2", "ACT_2": "freeze:1:5", "ACT_3": "hang:0:10"},
    )


def test_a_killed_rank_is_replaced_in_place_and_all_go_on_from_what_was_saved(troubled):
    first, second, *_ = troubled.outcome.attempts
    assert (first.cause, first.first_step, first.last_step) == ("crash", 1, 1)
    assert second.first_step == 2
    assert second.recovery_seconds is not None
    restart = troubled.of("restart")[0]
    assert restart["what"] == "ranks"
    assert "rank 3 on" in restart["message"]
    assert "killed by SIGKILL" in restart["message"]


def test_a_hang_is_named_with_rank_phase_and_step_and_mended_in_place(troubled):
    restart = troubled.of("restart")[1]
    assert (restart["what"], restart["cause"]) == ("ranks", "hang")
    assert "rank 1 on" in restart["message"]
    assert "stepping, step 5: no progress for" in restart["message"]
    assert "its process is stopped" in restart["message"]
    assert troubled.outcome.attempts[2].first_step == 5


def test_a_lost_supervisor_means_a_new_attempt_on_nodes_chosen_anew(troubled):
    assert [restart["what"] for restart in troubled.of("restart")] == ["ranks", "ranks", "attempt"]
    third, fourth = troubled.outcome.attempts[2:]
    assert (third.cause, third.last_step, fourth.first_step) == ("node_loss", 9, 10)


def test_one_ctrl_c_saves_at_the_next_step_and_stops(troubled):
    assert troubled.outcome.status == "stopped"
    assert troubled.outcome.problems == ()
    assert [event["signal"] for event in troubled.of("stopping")] == ["SIGINT"]
    last = troubled.outcome.attempts[-1]
    assert last.cause == "stopped"
    assert {result["steps"] for result in troubled.outcome.rank_results.values()} == {last.last_step}


def test_no_step_is_done_twice_or_left_out_over_all_attempts(troubled):
    assert steps_of(troubled) == list(range(1, troubled.outcome.attempts[-1].last_step + 1))


def test_a_users_error_ends_the_run_at_once_and_is_one_message(start):
    told = start(cpu_plan(nodes=2, slots=2), act_1="user_error:2:2")
    assert told.outcome.status == "failed"
    assert len(told.outcome.attempts) == 1
    (problem,) = told.outcome.problems
    assert "rank 2" in problem.message
    assert "ValueError: the sequence is longer than the model can take" in problem.message
    assert "Connection closed" not in problem.message
    assert "_act" in told.outcome.traceback


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once_and_says_what_is_kept(start):
    def interrupt(event):
        if (event["kind"] == "step" and event["step"] == 3) or event["kind"] == "stopping":
            os.kill(os.getpid(), signal.SIGINT)

    told = start(cpu_plan(nodes=2, slots=2), on_event=interrupt, steps=100_000, step_seconds=1)
    assert told.outcome.status == "stopped"
    (problem,) = told.outcome.problems
    assert "SIGINT came a second time" in problem.message
    assert "checkpoint of step" in problem.fix


@pytest.mark.slow
def test_ranks_that_do_not_stop_in_time_are_ended_and_it_is_said(start):
    def terminate(event):
        if event["kind"] == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    told = start(cpu_plan(nodes=2, slots=2, grace_seconds=1), on_event=terminate, act_1="hang:1:1")
    assert told.outcome.status == "stopped"
    assert "did not save and stop within 1 s (fault_tolerance.grace_seconds)" in told.outcome.problems[0].message


def test_a_plan_that_can_never_fit_is_refused_with_the_arithmetic_before_anything_starts(start):
    with pytest.raises(PlacementError, match="needs 6 CPU slots; 2 nodes hold 2 \\+ 2"):
        start(cpu_plan(nodes=3, slots=2))


def test_a_plan_that_only_does_not_fit_now_waits_with_a_reason_and_a_limit(two_nodes, monkeypatch):
    from orchestrator.launch.session import ray_session

    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
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
        from orchestrator.launch.placing import Placing
        from orchestrator.launch.ray_attempt import RayAttempt
        from orchestrator.launch.request import LaunchRequest

        placing = Placing(
            plan, plan.config.fault_tolerance.model_copy(update={"placement_timeout_seconds": 5}), reasons.append
        )
        attempt = RayAttempt(LaunchRequest(plan, "/nowhere", 0.0), ray, None, 1, {})
        see = lambda: read_nodes(ray, "cpu")  # noqa: E731
        make = lambda plan: attempt  # noqa: E731
        assert sorted(node.slots_free for node in see()) == [1, 2]
        assert placing.attempt(100.0, see, make) is None
        assert reasons == []
        assert placing.attempt(103.0, see, make) is None
        with pytest.raises(PlacementError, match="Others hold the rest now"):
            placing.attempt(105.5, see, make)
    assert [reason["kind"] for reason in reasons] == ["waiting"]
    assert "needs 4 CPU slots; 2 nodes hold" in reasons[0]["reason"]
