"""Whatever happens in whatever order, the loop comes to an end that its budgets allow. No Ray, no processes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import PlacementError
from orchestrator.launch.channel import Happening
from orchestrator.launch.ray_attempt import NodeTrouble
from tests.core.test_launch_policy_loop import DIED, World, finishes
from tests.launch.plans import cpu_plan

HAPPENINGS = ("ready", "step", "dies", "error", "memory", "gone", "attempt", "notice", "drained", "dead", "mute",
              "signal", "silence", "done", "checkpoint", "nan")  # fmt: skip


def happen(world: World, what: str, number: int) -> None:
    now = world.now
    if what == "ready":
        world.all_ready()
    elif what == "step":
        world.step(number)
    elif what == "dies":
        world.dies(number % 2, step=number)
    elif what == "memory":
        world.says(**DIED, rank=0, step=number, time=now, out_of_memory=True)
    elif what in ("error", "nan"):
        kind = "nan" if what == "nan" else "crash"
        world.rank(1, kind="error", **{"class": kind}, message="Connection reset", phase="stepping", step=number)
    elif what == "gone":
        world.queue.append(Happening("gone", 0, None))
    elif what == "attempt":
        world.queue.append(Happening("attempt", -1, (world.number, RuntimeError("over"))))
    elif what == "notice":
        world.queue.append(Happening("supervisor", 0, {"kind": "notice", "reason": "a file"}))
    elif what == "drained":
        world.nodes_trouble = NodeTrouble(leaving={f"n{number % 3}": now + number})
    elif what == "dead":
        world.nodes_trouble = NodeTrouble(dead=frozenset({"n0"}))
    elif what == "mute":
        world.mute ^= {f"n{number % 3}"}
    elif what == "signal":
        world.signal()
    elif what == "silence":
        world.wait(float(number))
    elif what == "checkpoint":
        world.rank(0, kind="checkpoint", step=number, path="x")
    else:
        world.all_done("stopped" if number % 2 else "finished")


scripts = st.lists(st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(1, 40)), max_size=6), max_size=8)


@settings(max_examples=400)
@given(scripts, st.booleans(), st.booleans(), st.sampled_from(["stop", "rewind"]))
def test_every_order_of_events_ends_the_run_within_its_budgets(lives, clears, stops, on_nan):
    def life(number: int):
        def play(world: World) -> None:
            world.nodes_trouble = NodeTrouble()
            if number > len(lives):
                finishes(world)
                return
            for what, value in lives[number - 1]:
                happen(world, what, value)

        return play

    plan = cpu_plan(
        max_restarts=2, max_preemptions=2, step_timeout_seconds=5, start_timeout_seconds=20, grace_seconds=5,
        placement_timeout_seconds=5, replan_after_seconds=5, on_nan=on_nan,
    )  # fmt: skip
    script = {number: life(number) for number in range(1, 40)}
    on_stop = (lambda world: world.all_done("stopped")) if stops else None
    world = World(plan, script, nodes=(2, 2, 2), on_stop=on_stop, clears=clears)
    try:
        outcome = world.run()
    except PlacementError:
        return  # every node is about to leave before the first attempt: nothing was started
    assert outcome.status in ("finished", "stopped", "failed")
    assert len(outcome.attempts) <= 1 + 2 + 2 + 2 + 2 + 3  # restarts, hangs, node losses, preemptions, rewinds
    assert bool(outcome.problems) or outcome.status != "failed"
    assert [attempt.number for attempt in outcome.attempts] == list(range(1, len(outcome.attempts) + 1))
    assert world.calls[-1] == "end" or world.calls.count("begin") == world.calls.count("end")
