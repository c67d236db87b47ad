"""The driver's loop, narrated: a scripted attempt and a clock that moves when nothing happens. No Ray, no processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.errors import PlacementError
from orchestrator.launch.channel import Happening
from orchestrator.launch.loop import RunLoop
from orchestrator.launch.ray_attempt import NodeTrouble
from orchestrator.launch.request import LaunchOutcome, LaunchRequest
from orchestrator.launch.timings import Timings
from orchestrator.placement.assign import RankReport, assign_coordinates
from orchestrator.placement.shares import choose_shares
from orchestrator.placement.topology import LocatedShare, Node, need_of
from orchestrator.plan.run_plan import RunPlan
from tests.launch.plans import cpu_plan

DIED = {"kind": "exited", "code": -9, "phase": "stepping"}
GLOO = "RuntimeError: Connection closed by peer"


class World:
    """Channel, clock and attempts in one: what the loop does goes into `calls`, what happens comes from the script."""

    def __init__(self, plan, script: dict[int, Callable[[World], None]], nodes=(2,), on_stop=None, clears=True) -> None:
        self.plan = plan
        self.script = script
        self.inventory = [Node(f"n{i}", f"node{i}", free, free) for i, free in enumerate(nodes)]
        self.on_stop = on_stop
        self.clears = clears
        self.now = 1000.0
        self.queue: deque[Happening | None] = deque()
        self.calls: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.generation = 0
        self.nodes_trouble = NodeTrouble()
        self.ending_seconds = 0.0
        """How long Ray takes to end an attempt."""
        self.mute: set[str] = set()
        """Nodes that answer nobody."""
        self.asked: list[list[str]] = []
        """Nodes that were asked whether they are there, at each look."""

    # the channel
    def next(self, timeout_seconds: float) -> Happening | None:
        happening = self.queue.popleft() if self.queue else None
        if happening is not None:
            return happening
        self.now += timeout_seconds
        assert self.now < 5000, f"the loop waits for ever; so far {self.calls}"
        return None

    def says(self, **message: Any) -> None:
        self.queue.append(Happening("supervisor", 0, {"generation": self.generation, **message}))

    def rank(self, rank: int, **event: Any) -> None:
        self.says(kind="event", rank=rank, event={"time": self.now, **event})

    def all_ready(self) -> None:
        for rank in range(len(self.plan.ranks)):
            self.rank(rank, kind="ready")

    def all_done(self, status: str = "finished", step: int = 3) -> None:
        for rank in range(len(self.plan.ranks)):
            self.rank(rank, kind="done", status=status, step=step, result={"steps": step})
            self.says(kind="exited", rank=rank, code=0, time=self.now, phase="finishing", step=step)

    def step(self, number: int) -> None:
        self.rank(0, kind="step", step=number)

    def dies(self, rank: int, step: int) -> None:
        self.says(**DIED, rank=rank, step=step, time=self.now)

    def wait(self, seconds: float) -> None:
        """Nothing happens for so long."""
        for _ in range(int(seconds / 0.2)):
            self.queue.append(None)  # type: ignore[arg-type]

    def signal(self, name: str = "SIGINT") -> None:
        self.queue.append(Happening("signal", -1, name))

    # the cluster
    def see(self, leaving: frozenset[str], doubted: frozenset[str]) -> list[Node]:
        self.asked.append(sorted(doubted))
        return [
            replace(node, leaving=node.node_id in leaving, silent=node.node_id in doubted & self.mute)
            for node in self.inventory
        ]

    # an attempt on Ray
    def make(self, number: int, plan: RunPlan) -> World:
        self.number, self.plan = number, plan
        return self

    @property
    def held(self) -> dict[str, int]:
        return dict.fromkeys(self.choice.node_ids, self.choice.share_size)

    def node_of(self, line: int) -> tuple[str, str]:
        return "n0", "node0"

    def reservation_problems(self):
        return ()

    def trouble(self) -> NodeTrouble:
        return self.nodes_trouble

    def begin(self, nodes) -> None:
        self.choice = choose_shares(nodes, need_of(self.plan))
        self.calls.append("begin")
        self.says(kind="hello")

    def greeted(self, line: int, facts: dict) -> bool:
        return True

    def owns(self, line: int) -> bool:
        return True

    def assign(self):
        return assign_coordinates(self.plan.ranks, [LocatedShare(0, "n0", "node0", tuple(range(len(self.plan.ranks))))])

    def start(self, number: int, placed, left_out=()) -> None:
        self.generation = number
        self.calls.append(f"start {number}" + (f" without {list(left_out)}" if left_out else ""))
        self.script[number](self)

    def report_of(self, line: int, rank: int, event: dict) -> RankReport:
        return RankReport(rank, event.get("node_id", "n0"), None)

    def stop(self, generation: int) -> None:
        self.calls.append("stop")
        if self.on_stop:
            self.on_stop(self)

    def kill(self, generation: int, ask_where=()) -> None:
        self.calls.append("kill" + (f" after asking {list(ask_where)}" if ask_where else ""))
        if self.clears:
            self.says(kind="cleared")

    def cleared(self, line: int) -> bool:
        return True

    def end(self) -> None:
        self.calls.append("end")
        self.now += self.ending_seconds

    def run(self) -> LaunchOutcome:
        request = LaunchRequest(self.plan, "/run", self.now)
        clock = lambda: self.now  # noqa: E731
        return RunLoop(request, self, self.events.append, Timings(self.now), self.see, self.make, clock).run()  # type: ignore[arg-type]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def finishes(world: World) -> None:
    world.all_ready()
    world.all_done()


def test_a_run_without_trouble_begins_starts_and_ends_once():
    world = World(cpu_plan(), {1: finishes})
    outcome = world.run()
    assert (outcome.status, outcome.problems) == ("finished", ())
    assert world.calls == ["begin", "start 1", "end"]
    assert [event["kind"] for event in world.events] == ["placement", "ready"]
    assert outcome.rank_results == {0: {"steps": 3}, 1: {"steps": 3}}


def test_a_dead_rank_has_all_ranks_killed_and_started_anew_on_the_same_shares():
    def dies(world):
        world.all_ready()
        world.step(1)
        world.rank(0, kind="error", **{"class": "crash"}, message=GLOO, phase="stepping", step=2)
        world.dies(1, step=2)

    world = World(cpu_plan(), {1: dies, 2: finishes})
    outcome = world.run()
    assert world.calls == ["begin", "start 1", "kill", "start 2", "end"]
    assert [attempt.cause for attempt in outcome.attempts] == ["crash", "finished"]
    assert "rank 1 on node0, stepping, step 2: killed by SIGKILL" in world.of("restart")[0]["message"]
    assert "rank 0 then lost the connection" in world.of("restart")[0]["message"]


def test_steps_that_another_node_had_reported_count_though_the_failure_was_heard_of_first():
    def first(world):
        world.all_ready()
        world.dies(1, step=3)
        world.step(1)
        world.step(2)

    def second(world):
        world.all_ready()
        world.all_done()

    world = World(cpu_plan(nodes=1, slots=2), {1: first, 2: second})
    failed, mended = world.run().attempts
    assert (failed.cause, failed.first_step, failed.last_step) == ("crash", 1, 2)
    assert (mended.cause, mended.first_step) == ("finished", None)


def test_steps_and_checkpoints_that_are_heard_of_after_a_node_was_lost_count_for_the_attempt_that_did_them():
    def lost(world):
        world.all_ready()
        world.queue.append(Happening("gone", 0, None))
        world.rank(0, kind="resumed", step=3, checkpoint="x")
        world.step(4)
        world.step(5)
        world.rank(0, kind="checkpoint", step=5, path="x")
        world.dies(0, step=6)  # of ranks that are given up already nothing else matters

    def again(world):
        world.rank(0, kind="resumed", step=5, checkpoint="x")
        finishes(world)

    world = World(cpu_plan(), {1: lost, 2: again})
    failed, mended = world.run().attempts
    assert (failed.cause, failed.first_step, failed.last_step, failed.resumed_step) == ("node_loss", 4, 5, 3)
    assert (mended.cause, mended.resumed_step) == ("finished", 5)
    assert [event["attempt"] for event in world.of("step")] == [1, 1]
    assert [event["step"] for event in world.of("checkpoint")] == [5]


PHASES = ("rendezvous", "building", "loading", "reading")


def works_after(world: World, step: int) -> None:
    """The ranks reach `step` in five seconds, one for each phase and one for the step."""
    for phase in PHASES:
        world.now += 1
        world.rank(0, kind="phase", phase=phase)
    world.now += 1
    world.step(step)


def test_the_way_back_to_work_is_recorded_in_parts_that_add_up():
    def dies(world):
        world.all_ready()
        world.step(1)
        world.dies(1, step=2)
        world.now += 0.25

    def mended(world):
        works_after(world, 1)
        world.all_ready()
        world.all_done()

    world = World(cpu_plan(), {1: dies, 2: mended})
    first, second = world.run().attempts
    assert (first.recovery_seconds, first.recovery_parts) == (None, {})
    assert second.recovery_parts == {
        "noticed": pytest.approx(0.25), "killed": 0, "engine imports": 1, "process group": 1, "model": 1,
        "data and checkpoint": 1, "first step": 1,
    }  # fmt: skip
    assert second.recovery_seconds == pytest.approx(5.25)
    (event,) = world.of("recovered")
    assert (event["seconds"], event["attempt"]) == (second.recovery_seconds, 2)


def test_a_hang_is_counted_from_the_last_sign_of_life_and_a_new_placement_has_its_own_parts():
    def hangs(world):
        world.all_ready()
        world.step(1)
        world.says(kind="beats", beats=dict.fromkeys((0, 1), ("stepping", 2, 0.0, False)))

    def lost(world):
        works_after(world, 1)
        world.queue.append(Happening("gone", 0, None))

    def third(world):
        works_after(world, 2)
        world.all_ready()
        world.all_done()

    world = World(cpu_plan(step_timeout_seconds=30), {1: hangs, 2: lost, 3: third})
    _, second, third_attempt = world.run().attempts
    assert second.recovery_parts["noticed"] == pytest.approx(30, abs=0.5)
    assert "nodes" not in second.recovery_parts
    assert list(third_attempt.recovery_parts)[:4] == ["noticed", "killed", "nodes", "workers"]


def test_what_goes_wrong_while_a_failure_is_mended_belongs_to_the_same_way_back():
    def dies(world):
        world.step(1)
        world.dies(1, step=2)

    def mended(world):
        works_after(world, 1)
        world.all_ready()
        world.all_done()

    world = World(cpu_plan(), {1: dies, 2: mended}, clears=False)  # killed ranks are not gone within ten seconds
    _, second = world.run().attempts
    assert list(second.recovery_parts)[:4] == ["noticed", "killed", "nodes", "workers"]
    assert second.recovery_parts["killed"] >= 10
    assert second.recovery_seconds >= 15


def test_an_attempt_that_did_no_step_never_came_back_and_the_next_is_counted_from_its_failure():
    def dies(world):
        world.step(1)
        world.dies(1, step=2)

    def lost(world):
        world.now += 7
        world.queue.append(Happening("gone", 0, None))

    def last(world):
        works_after(world, 1)
        world.all_ready()
        world.all_done()

    world = World(cpu_plan(), {1: dies, 2: lost, 3: last})
    _, second, third = world.run().attempts
    assert second.recovery_seconds is None
    assert third.recovery_seconds == pytest.approx(5)


def test_the_same_step_failing_twice_ends_the_run_even_when_it_was_never_completed_again():
    def dies(world):
        world.dies(1, step=2)

    world = World(cpu_plan(), {1: dies, 2: dies})
    outcome = world.run()
    assert outcome.status == "failed"
    assert "it failed twice in a row at step 2" in outcome.problems[0].message
    assert world.calls == ["begin", "start 1", "kill", "start 2", "kill", "end"]


def test_ranks_that_outlive_their_killing_mean_another_attempt():
    world = World(cpu_plan(), {1: lambda world: world.dies(1, step=2), 2: finishes}, clears=False)
    assert world.run().status == "finished"
    assert world.calls == ["begin", "start 1", "kill", "end", "begin", "start 2", "end"]


def test_a_silent_rank_is_asked_where_it_is_before_it_is_killed():
    def hangs(world):
        world.all_ready()
        world.step(1)
        beats = {0: ("stepping", 2, 0.0, False), 1: ("saving", 1, 0.0, False)}
        world.says(kind="beats", beats=beats)

    world = World(cpu_plan(step_timeout_seconds=30), {1: hangs, 2: finishes})
    assert world.run().status == "finished"
    assert world.calls == ["begin", "start 1", "kill after asking [1]", "start 2", "end"]
    assert "rank 1 on node0, saving, step 1: no progress for 30" in world.of("restart")[0]["message"]


def test_a_lost_supervisor_ends_the_attempt_and_begins_another():
    def lost(world):
        world.step(1)
        world.queue.append(Happening("gone", 0, None))

    world = World(cpu_plan(), {1: lost, 2: finishes})
    outcome = world.run()
    assert world.calls == ["begin", "start 1", "kill", "end", "begin", "start 2", "end"]
    assert [attempt.cause for attempt in outcome.attempts] == ["node_loss", "finished"]


def test_nodes_of_an_attempt_that_is_lost_are_asked_whether_they_are_there_and_a_silent_one_is_left_out():
    def lost(world):
        world.step(1)
        world.mute = {"n0"}
        world.queue.append(Happening("gone", 0, None))

    world = World(cpu_plan(), {1: lost, 2: finishes}, nodes=(2, 2))
    assert world.run().status == "finished"
    assert world.asked == [[], ["n0"]], "nobody is doubted before something was lost"
    assert world.choice.node_ids == ("n1",)


def test_a_node_whose_supervisor_alone_has_crashed_answers_and_is_used_again():
    def crashed(world):
        world.step(1)
        world.queue.append(Happening("gone", 0, None))

    world = World(cpu_plan(), {1: crashed, 2: finishes}, nodes=(2, 2))
    assert world.run().status == "finished"
    assert world.choice.node_ids == ("n0",)


def test_a_lost_node_stays_in_doubt_when_the_next_attempt_is_lost_too_and_is_used_when_it_answers():
    def first(world):
        world.step(1)
        world.mute = {"n0"}
        world.queue.append(Happening("gone", 0, None))

    def second(world):
        world.step(2)
        world.mute = {"n1"}
        world.queue.append(Happening("gone", 0, None))

    world = World(cpu_plan(), {1: first, 2: second, 3: finishes}, nodes=(2, 2))
    assert world.run().status == "finished"
    assert world.asked == [[], ["n0"], ["n0", "n1"]]
    assert world.choice.node_ids == ("n0",)


def test_ranks_that_outlive_their_killing_leave_their_node_in_doubt():
    def powerless(world):
        world.mute = {"n0"}
        world.dies(1, step=2)

    world = World(cpu_plan(), {1: powerless, 2: finishes}, nodes=(2, 2), clears=False)
    assert world.run().status == "finished"
    assert world.choice.node_ids == ("n1",)


def test_waiting_for_a_node_is_a_part_of_the_way_back_and_counts_from_when_the_loss_was_noticed():
    def lost(world):
        world.step(1)
        world.mute = {"n0"}
        world.ending_seconds = 4
        world.queue.append(Happening("gone", 0, None))

    def smaller(world):
        works_after(world, 2)
        world.all_ready()
        world.all_done()

    plan = cpu_plan(nodes=2, slots=1, replan_after_seconds=6, placement_timeout_seconds=600)
    world = World(plan, {1: lost, 2: smaller}, nodes=(1, 1))
    _, again = world.run().attempts
    assert list(again.recovery_parts)[:5] == ["noticed", "killed", "waiting", "nodes", "workers"]
    assert again.recovery_parts["killed"] == 4
    assert again.recovery_parts["waiting"] == pytest.approx(2, abs=0.3)
    assert again.recovery_parts["nodes"] == 0
    assert again.world_size == 1


def test_nobody_waits_for_the_ranks_of_a_node_that_is_lost_when_the_run_ends_with_it():
    def lost(world):
        world.step(1)
        world.queue.append(Happening("gone", 0, None))

    world = World(cpu_plan(max_node_losses=0), {1: lost}, clears=False)
    assert world.run().status == "failed"
    assert world.now < 1001


def test_ranks_elsewhere_than_placed_are_not_trained_with():
    def elsewhere(world):
        world.rank(0, kind="ready")
        world.rank(1, kind="ready", node_id="n7")

    world = World(cpu_plan(max_restarts=0), {1: elsewhere})
    outcome = world.run()
    assert outcome.status == "failed"
    assert "rank 1 was placed on node0, but runs on node n7" in outcome.problems[0].message


def test_one_signal_stops_after_saving():
    def runs(world):
        world.all_ready()
        world.step(1)
        world.signal()

    world = World(cpu_plan(), {1: runs}, on_stop=lambda world: world.all_done("stopped", 2))
    outcome = world.run()
    assert (outcome.status, outcome.problems) == ("stopped", ())
    assert world.calls == ["begin", "start 1", "stop", "end"]


def test_a_second_signal_does_not_wait():
    def runs(world):
        world.rank(0, kind="checkpoint", step=7, path="x")
        world.signal()
        world.signal("SIGTERM")

    world = World(cpu_plan(), {1: runs})
    outcome = world.run()
    assert outcome.status == "stopped"
    assert world.calls == ["begin", "start 1", "stop", "kill", "end"]
    assert str(outcome.problems[0]) == (
        "SIGTERM came a second time: the ranks were ended at once. "
        "The same command goes on from the newest complete checkpoint."
    )


def test_saving_has_its_time_and_no_more():
    world = World(cpu_plan(grace_seconds=20), {1: lambda world: world.signal()})
    outcome = world.run()
    assert outcome.status == "stopped"
    assert "did not save and stop within 20 s (fault_tolerance.grace_seconds)" in outcome.problems[0].message
    assert 1020 <= world.now < 1025


def test_a_rank_that_fails_while_it_is_being_stopped_fails_the_run():
    world = World(cpu_plan(), {1: lambda world: world.signal()}, on_stop=lambda world: world.dies(0, step=4))
    outcome = world.run()
    assert outcome.status == "failed"
    assert "it failed while it was being stopped" in outcome.problems[0].message


def test_a_plan_that_can_never_fit_is_refused_without_waiting():
    world = World(cpu_plan(slots=4), {}, nodes=(2,))
    with pytest.raises(PlacementError, match="needs 4 CPU slots; 1 node holds 2"):
        world.run()
    assert world.now < 1001


def test_busy_nodes_are_waited_for_with_a_reason_and_taken_when_they_are_free():
    world = World(cpu_plan(slots=2), {1: finishes})
    world.inventory = [Node("n0", "node0", 2, 1)]
    told = world.events.append

    def observe(event):
        told(event)
        if event["kind"] == "waiting":
            world.inventory = [Node("n0", "node0", 2, 2)]

    request = LaunchRequest(world.plan, "/run", world.now)
    outcome = RunLoop(request, world, observe, Timings(world.now), world.see, world.make, lambda: world.now).run()  # type: ignore[arg-type]
    assert outcome.status == "finished"
    assert "needs 2 CPU slots; 1 node holds 1" in world.of("waiting")[0]["reason"]


def test_supervisors_that_never_come_up_end_the_attempt_at_the_limit():
    world = World(cpu_plan(start_timeout_seconds=40, max_restarts=0), {})
    world.greeted = lambda line, facts: False  # type: ignore[method-assign]
    outcome = world.run()
    assert outcome.status == "failed"
    assert "not all node shares were up within 40 s" in outcome.problems[0].message


def test_the_end_of_rays_attempt_by_itself_is_a_failure_with_its_last_line():
    def ends(world):
        world.queue.append(Happening("attempt", -1, (1, RuntimeError("a\nModuleNotFoundError: No module named 'x'"))))

    world = World(cpu_plan(max_restarts=0), {1: ends})
    outcome = world.run()
    assert "Ray Train ended the attempt: RuntimeError: ModuleNotFoundError: No module" in outcome.problems[0].message


def test_a_preemption_notice_has_the_ranks_save_and_the_run_placed_anew_without_that_node():
    def noticed(world):
        world.all_ready()
        world.step(4)
        world.nodes_trouble = NodeTrouble(leaving={"n0": None})

    def saved(world):
        world.all_done("stopped", 5)

    world = World(cpu_plan(), {1: noticed, 2: finishes}, nodes=(2, 2), on_stop=saved)
    outcome = world.run()
    assert outcome.status == "finished"
    assert world.calls == ["begin", "start 1", "stop", "kill", "end", "begin", "start 2", "end"]
    assert [attempt.cause for attempt in outcome.attempts] == ["preemption", "finished"]
    assert world.choice.node_ids == ("n1",)
    assert "node0 is about to be taken away (the cluster says so)" in world.of("preemption")[0]["message"]


def test_a_notice_from_a_file_on_the_node_does_the_same():
    def noticed(world):
        world.all_ready()
        world.queue.append(Happening("supervisor", 0, {"kind": "notice", "reason": "/tmp/spot has appeared"}))

    world = World(cpu_plan(), {1: noticed, 2: finishes}, nodes=(2, 2), on_stop=lambda world: world.all_done("stopped"))
    assert world.run().status == "finished"
    assert "/tmp/spot has appeared" in world.of("restart")[0]["message"]


def test_ranks_that_do_not_save_before_the_node_goes_are_ended_and_the_run_moves_all_the_same():
    def noticed(world):
        world.all_ready()
        world.nodes_trouble = NodeTrouble(leaving={"n0": world.now + 8})

    world = World(cpu_plan(grace_seconds=30), {1: noticed, 2: finishes}, nodes=(2, 2))
    outcome = world.run()
    assert outcome.status == "finished"
    assert "the ranks did not save in time" in outcome.attempts[0].detail
    assert 1008 <= world.now < 1020


def test_a_preemption_beyond_its_budget_saves_and_ends_the_run():
    def noticed(world):
        world.all_ready()
        world.nodes_trouble = NodeTrouble(leaving={"n0": None})

    plan = cpu_plan(max_preemptions=0)
    world = World(plan, {1: noticed}, nodes=(2, 2), on_stop=lambda world: world.all_done("stopped"))
    outcome = world.run()
    assert outcome.status == "failed"
    assert "max_preemptions=0" in outcome.problems[0].message
    assert "The same command continues it." in outcome.problems[0].fix


def test_a_node_that_the_cluster_lost_ends_the_attempt_before_any_line_breaks():
    def lost(world):
        world.all_ready()
        world.nodes_trouble = NodeTrouble(dead=frozenset({"n0"}))

    def back(world):
        world.nodes_trouble = NodeTrouble()
        finishes(world)

    world = World(cpu_plan(), {1: lost, 2: back})
    outcome = world.run()
    assert [attempt.cause for attempt in outcome.attempts] == ["node_loss", "finished"]


def test_a_rewind_starts_the_ranks_anew_without_the_step():
    def diverges(world):
        world.all_ready()
        world.rank(0, kind="error", **{"class": "nan"}, message="loss is nan", phase="stepping", step=7)

    world = World(cpu_plan(on_nan="rewind"), {1: diverges, 2: finishes})
    assert world.run().status == "finished"
    assert world.calls == ["begin", "start 1", "kill", "start 2 without [7]", "end"]


def test_a_rank_killed_for_memory_ends_the_run_and_names_the_next_plan():
    def killed(world):
        world.all_ready()
        world.says(**DIED, rank=1, step=2, time=world.now, out_of_memory=True)

    outcome = World(cpu_plan(), {1: killed}).run()
    assert outcome.status == "failed"
    assert outcome.attempts[0].cause == "oom"
    assert "because the host ran out of memory" in outcome.problems[0].message


def test_a_slow_rank_is_named_and_left_alone():
    def slow(world):
        world.all_ready()
        for step in range(1, 12):
            beats = dict.fromkeys((0, 1), ("stepping", step, 0.0, False))
            world.says(kind="beats", beats=beats, paces={0: 0.1, 1: 0.9})
        world.wait(6.0)
        world.all_done()

    world = World(cpu_plan(), {1: slow})
    assert world.run().status == "finished"
    (event,) = world.of("straggler")
    assert (event["rank"], event["node"]) == (1, "node0")


def test_what_an_attempt_went_on_from_is_kept():
    def resumes(world):
        world.rank(0, kind="resumed", step=40, checkpoint="x")
        finishes(world)

    (attempt,) = World(cpu_plan(), {1: resumes}).run().attempts
    assert (attempt.resumed_step, attempt.nodes) == (40, ("node0",))
