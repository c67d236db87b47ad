"""The driver's loop: attempts on Ray Train, generations of ranks inside them, decisions between.

An *attempt on Ray* (`fit`) holds the node shares; a *generation* is one life of the ranks on them, and counts as an
attempt of the run. `policy.decide` says what follows a failure; this file carries it out. Everything that happens
comes out of one queue (`channel.py`), so there is one thread to think about.

    placing -> supervisors start -> ranks run -> done
       ^                              |  failure: kill, wait until clear
       +---------- Retry -------------+---- RestartRanks: ranks run again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from orchestrator.errors import PlacementError, Problem
from orchestrator.launch.channel import Channel, Happening
from orchestrator.launch.generation import Generation, Limits
from orchestrator.launch.history import History
from orchestrator.launch.placing import Placing
from orchestrator.launch.policy import (
    Failure,
    FailureKind,
    PolicyState,
    RestartRanks,
    Retry,
    Stop,
    decide,
    restart_event,
)
from orchestrator.launch.ray_attempt import RayAttempt
from orchestrator.launch.report import describe, error_line, first_cause, leaving_words, node_list, remedy
from orchestrator.launch.request import LaunchOutcome, LaunchRequest
from orchestrator.launch.timings import Timings
from orchestrator.launch.watch import Watch
from orchestrator.placement.assign import verify_placement
from orchestrator.placement.topology import Node, PlacedRank
from orchestrator.plan.run_plan import RunPlan

Observe = Callable[[dict[str, Any]], None]
Status = Literal["finished", "stopped", "failed"]
See = Callable[[frozenset[str], frozenset[str]], Sequence[Node]]
MakeAttempt = Callable[[int, RunPlan], RayAttempt]

_TICK_SECONDS = 0.2
"""How often deadlines are looked at while nothing happens."""
_CLEAR_SECONDS = 10.0
"""Time that killed ranks have to be gone; a process that outlives SIGKILL hangs in the kernel."""
_EXIT_SECONDS = 5.0
"""Time that ranks have to end after they have said that they are done."""


class RunLoop:
    """Brings one run to its end. Used once."""

    def __init__(
        self,
        request: LaunchRequest,
        channel: Channel,
        observe: Observe,
        timings: Timings,
        see: See,
        make_attempt: MakeAttempt,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`see(leaving, doubted)`: the nodes now; the first are known to go, the second are asked whether they live.
        `make_attempt(number, plan)`: an attempt on Ray that has not begun. Tests pass both without Ray, and a clock."""
        tolerance = request.plan.config.fault_tolerance
        self._request = request
        self._channel = channel
        self._observe = observe
        self._timings = timings
        self._see, self._make_attempt = see, make_attempt
        self._clock = clock
        self._limits = Limits(tolerance.start_timeout_seconds, tolerance.step_timeout_seconds)
        self._tolerance = tolerance
        self._policy = PolicyState.of(tolerance)
        self._placing: Placing[RayAttempt] = Placing(request.plan, tolerance, observe)
        self._ray_attempts = 0
        self._held: RayAttempt | None = None  # None: nodes are being looked for
        self._held_since = 0.0
        self._given_up_at = 0.0  # when the last attempt was, or the last generation
        self._generation: Generation | None = None
        self._watch = Watch()
        self._history = History(observe, timings)
        self._placed: tuple[PlacedRank, ...] = ()
        self._problems: list[Problem] = []
        self._traceback = ""
        self._pending: RestartRanks | Retry | Stop | None = None  # carried out when the killed ranks are gone
        self._moving: tuple[Retry | Stop, str] | None = None  # a preemption: carried out when the ranks have saved
        self._deadline: float | None = None  # of what is waited for: ranks being killed, exiting, or saving
        self._stop_signals = 0
        self._status: Status | None = None

    def run(self) -> LaunchOutcome:
        """Until the run has finished, stopped or failed. Raises `PlacementError` when nothing could be started."""
        self._look_at_the_clock(self._clock())
        while self._status is None:
            happening = self._channel.next(_TICK_SECONDS)
            if happening is not None:
                self._take(happening)
            if self._status is None:
                self._look_at_the_clock(self._clock())
        if self._held is not None:
            self._held.end()
        done = self._generation.done if self._generation else {}
        return LaunchOutcome(
            status=self._status,
            attempts=self._history.attempts,
            rank_results={rank: event.get("result") or {} for rank, event in sorted(done.items())},
            problems=tuple(self._problems),
            placement=self._placed,
            timings=self._timings.splits(),
            traceback=self._traceback,
            plan=self._placing.plan,
        )

    # -- what happens -------------------------------------------------------------------------------------------------

    def _take(self, happening: Happening) -> None:
        if happening.source == "signal":
            self._asked_to_stop(happening.body, self._clock())
        elif happening.source == "attempt":
            number, error = happening.body
            if number == self._ray_attempts and self._held is not None:
                self._share_failed("attempt_failed", f"Ray Train ended the attempt: {error_line(error)}")
        elif happening.source == "gone":
            if self._held is not None and self._held.owns(happening.line):
                node = self._held.node_of(happening.line)[1]
                self._share_failed("node_loss", f"the supervisor on {node}, or the node itself, is gone")
                self._cleared(happening.line)
        else:
            self._hear(happening.line, happening.body)

    def _hear(self, line: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            if self._held is not None and self._held.greeted(line, message):
                self._history.way.mark("workers", self._clock())
                self._start_ranks()
            return
        if kind == "warm":
            self._history.way.mark("warm-up", self._clock())
            self._observe({**message, "kind": "warm"})
            return
        if kind == "notice" and self._held is not None and self._held.owns(line):
            self._noticed({self._held.node_of(line)[0]: None}, message["reason"], self._clock())
            return
        generation = self._generation
        if generation is None or message.get("generation") != generation.number:
            self._history.hear_late(message)
            return
        if kind == "event":
            self._hear_rank(line, generation, message["rank"], message["event"])
        elif kind == "exited":
            generation.note_exit(message)
        elif kind == "beats":
            generation.note_beats(message["beats"], self._clock())
            self._watch.note_paces(message.get("paces", {}), {r: beat[1] for r, beat in message["beats"].items()})
        elif kind == "cleared":
            self._cleared(line)

    def _cleared(self, line: int) -> None:
        """A supervisor has no ranks left, or is gone itself."""
        if self._pending and self._held and self._held.cleared(line):
            self._carry_out()

    def _hear_rank(self, line: int, generation: Generation, rank: int, event: dict[str, Any]) -> None:
        assert self._held is not None
        kind = event["kind"]
        if kind == "rendezvous":
            self._held.spread_rendezvous(generation.number, line, event["port"])
            return
        if kind == "ready":
            event["report"] = self._held.report_of(line, rank, event)
        self._history.note(generation, rank, event)
        if kind == "ready" and len(generation.ready) == len(generation.placed):
            self._verify(generation)
        if generation.all_done and self._deadline is None:
            self._deadline = self._clock() + _EXIT_SECONDS

    def _verify(self, generation: Generation) -> None:
        assert self._held is not None
        reports = {rank: event["report"] for rank, event in generation.ready.items()}
        problems = (*verify_placement(generation.placed, reports), *self._held.reservation_problems())
        if not problems:
            self._observe({"kind": "ready", "attempt": generation.number, "ranks": generation.identities()})
            return
        self._share_failed("placement", "; ".join(problem.message for problem in problems))

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _look_at_the_clock(self, now: float) -> None:
        generation = self._generation
        overdue = self._deadline is not None and now > self._deadline
        if self._held is None:
            self._try_to_place(now)
        elif self._pending is not None:
            if overdue:  # killed ranks are not gone in time
                if isinstance(self._pending, RestartRanks):
                    self._pending, self._given_up_at = Retry(self._pending.state), now
                self._carry_out()
        elif self._look_at_the_nodes(self._held, now):
            return
        elif generation is None:
            if now - self._held_since > self._limits.start_seconds:
                seconds = f"{self._limits.start_seconds:g} s (fault_tolerance.start_timeout_seconds)"
                self._share_failed("attempt_failed", f"not all node shares were up within {seconds}")
        elif generation.all_done:
            if overdue or len(generation.gone) == len(generation.placed):
                self._close_done(generation, now)
        elif generation.judgeable(now):
            self._rank_failed(generation, now)
        elif overdue:
            self._give_up_saving(now)
        else:
            hung = generation.overdue(now, self._limits)
            if hung is not None:
                generation.failures[hung.rank] = hung
                self._rank_failed(generation, now)

    def _look_at_the_nodes(self, held: RayAttempt, now: float) -> bool:
        """Ask now and then what the cluster says of the nodes; True when that ended the generation."""
        for slow in self._watch.stragglers(now):
            node = next((entry.node_name for entry in self._placed if entry.rank == slow.rank), "")
            self._observe({"kind": "straggler", "node": node, **asdict(slow)})
        trouble = self._watch.trouble(now, held.trouble)
        if trouble is None:
            return False
        if trouble.dead:
            self._share_failed("node_loss", f"the cluster lost {node_list(trouble.dead)}")
            return True
        if trouble.leaving:
            self._noticed(trouble.leaving, "the cluster says so", now)
        return False

    def _try_to_place(self, now: float) -> None:
        number, watch = self._ray_attempts + 1, self._watch
        try:
            begun = self._placing.attempt(
                now, lambda: self._see(watch.leaving, watch.doubted), lambda plan: self._make_attempt(number, plan)
            )
        except PlacementError as error:
            if not self._history.count:
                raise
            self._problems.extend(error.problems)
            self._status = "failed"
            return
        if begun is not None:
            if self._placing.waited:
                self._history.way.mark("waiting", now)
            self._history.way.mark("nodes", self._clock())
            self._ray_attempts = number
            self._held, self._held_since = begun, now

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _start_ranks(self) -> None:
        assert self._held is not None
        self._placed = self._held.assign()
        number = self._history.count + 1
        self._generation = Generation(number, self._placed, self._clock(), self._history.way, mends=number > 1)
        self._watch.begin()
        self._deadline = None
        self._observe({"kind": "placement", "attempt": number, "table": [asdict(entry) for entry in self._placed]})
        self._held.start(number, self._placed, self._policy.left_out)

    def _rank_failed(self, generation: Generation, now: float) -> None:
        failures = list(generation.failures.values())
        cause = first_cause(failures)
        self._traceback = self._traceback or cause.traceback
        # The rank's own beat is exact; what it had reported lags behind, and after a restart it has reported nothing.
        step = cause.step or generation.failed_step
        hung = cause.source == "silent"
        self._failed(cause.kind, describe(failures), step, min(now, cause.time), now, hung=hung)

    def _share_failed(self, kind: FailureKind, detail: str) -> None:
        if self._pending is None or isinstance(self._pending, RestartRanks):
            now = self._clock()
            step = self._generation.failed_step if self._generation else None
            self._failed(kind, detail, step, now, now)

    def _failed(
        self, kind: FailureKind, detail: str, step: int | None, failed_at: float, now: float, *, hung: bool = False
    ) -> None:
        generation = self._generation
        decision = decide(self._policy, Failure(kind, step, failed_at))
        self._moving = None
        self._history.close(generation, kind, detail, now, failed_at)
        if isinstance(decision, Stop):
            failures = list(generation.failures.values()) if generation else []
            hint = remedy(kind, failures, self._placing.plan, f"{self._request.run_directory}/logs/")
            self._problems.append(Problem("", f"{detail}. The run ends: {decision.reason}.", hint))
        else:
            self._go_on(decision, kind, detail)
        self._kill_then(decision, now, ask_where=list(generation.failures) if generation and hung else [])

    def _go_on(self, decision: RestartRanks | Retry, kind: FailureKind, detail: str) -> None:
        self._policy = decision.state
        self._observe(restart_event(decision, kind, detail, attempt=self._history.count))

    def _kill_then(self, decision: RestartRanks | Retry | Stop, now: float, ask_where: list[int]) -> None:
        self._pending, self._given_up_at = decision, now
        self._deadline = now + _CLEAR_SECONDS
        if self._generation is None or self._held is None or isinstance(decision, Retry):
            # Nodes may be gone with their ranks, so nobody is waited for: what is left ends with its supervisor.
            if self._generation is not None and self._held is not None:
                self._held.kill(self._generation.number)
            self._carry_out()
            return
        self._held.kill(self._generation.number, ask_where)

    def _carry_out(self) -> None:
        decision, self._pending, self._deadline = self._pending, None, None
        if isinstance(decision, Retry) and self._held is not None:
            self._watch.note_doubt(self._held.held)
            self._placing.again(self._given_up_at, self._held.held)
            self._held.end()
        self._history.way.mark("killed", self._clock())
        if isinstance(decision, RestartRanks):
            self._start_ranks()
        elif isinstance(decision, Retry):
            self._held = self._generation = None
            self._watch.begin()
        else:
            self._status = "stopped" if self._stop_signals and not self._history.ended_in_failure else "failed"

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _noticed(self, nodes: dict[str, float | None], reason: str, now: float) -> None:
        """Nodes of this attempt are about to be taken away: save, then go on without them."""
        new, generation = self._watch.note_leaving(nodes), self._generation
        if not new or self._pending is not None or self._moving is not None or self._stop_signals:
            return
        detail = leaving_words(self._placed, new, reason)
        if generation is None:
            self._share_failed("preemption", detail)
            return
        if generation.all_done:
            return
        decision = decide(self._policy, Failure("preemption", generation.failed_step, now))
        assert not isinstance(decision, RestartRanks)
        self._moving = decision, detail
        grace = self._tolerance.grace_seconds
        self._deadline = min([now + grace, *(moment for moment in nodes.values() if moment is not None)])
        self._observe({"kind": "preemption", "message": detail, "grace_seconds": max(0.0, self._deadline - now)})
        assert self._held is not None
        self._held.stop(generation.number)

    def _move(self, generation: Generation, detail: str, now: float) -> None:
        """The ranks have saved, or had their time to."""
        assert self._moving is not None
        decision, self._moving = self._moving[0], None
        self._history.close(generation, "preemption", detail, now)
        if isinstance(decision, Stop):
            message = f"{detail}. The run ends: {decision.reason}."
            self._problems.append(Problem("", message, "The same command continues it."))
        else:
            self._go_on(decision, "preemption", detail)
        self._kill_then(decision, now, ask_where=[])

    def _asked_to_stop(self, name: str, now: float) -> None:
        self._stop_signals += 1
        if (generation := self._generation) is None or self._pending is not None:
            self._observe({"kind": "stopping", "signal": name, "grace_seconds": None})
            self._history.close(generation, "stopped", f"{name} before the ranks ran", now)
            self._status = "stopped"
            return
        if self._stop_signals > 1:
            self._end_at_once(f"{name} came a second time: the ranks were ended at once.", now)
            return
        self._policy = replace(self._policy, stopping=True)
        self._moving = None
        self._deadline = now + self._tolerance.grace_seconds
        self._observe({"kind": "stopping", "signal": name, "grace_seconds": self._tolerance.grace_seconds})
        assert self._held is not None
        self._held.stop(generation.number)

    def _give_up_saving(self, now: float) -> None:
        seconds = f"{self._tolerance.grace_seconds:g} s (fault_tolerance.grace_seconds)"
        if self._moving is not None and self._generation is not None:
            self._move(self._generation, f"{self._moving[1]}; the ranks did not save in time", now)
            return
        self._end_at_once(f"the ranks did not save and stop within {seconds}.", now)

    def _end_at_once(self, message: str, now: float) -> None:
        self._problems.append(Problem("", message, "The same command goes on from the newest complete checkpoint."))
        self._history.close(self._generation, "stopped", message, now)
        self._kill_then(Stop(message), now, ask_where=[])

    def _close_done(self, generation: Generation, now: float) -> None:
        stopped = any(event.get("status") == "stopped" for event in generation.done.values())
        if stopped and self._moving is not None:
            self._move(generation, self._moving[1], now)
            return
        self._status = "stopped" if stopped else "finished"
        self._history.close(generation, self._status, "", now)
