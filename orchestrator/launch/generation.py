"""One life of the ranks as the driver sees it: who is ready, who is done, who failed, who is silent. No ray, no clock.

`loop.py` feeds it what happens, with the time; it answers what follows: whether all are done, whether the failures can
be judged yet, which rank is overdue. Clock readings are `time.time()` seconds.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.launch.board import PHASES
from orchestrator.launch.policy import FailureKind
from orchestrator.launch.report import RankFailure, exit_words
from orchestrator.launch.timings import Timings
from orchestrator.placement.topology import PlacedRank

_SETTLE_SECONDS = 2.0
"""After a failure that reads like a consequence: time for its cause to be heard of, from another node perhaps."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long ranks may take, from `fault_tolerance`."""

    start_seconds: float
    """Until the first step is complete."""
    step_seconds: float
    """Between two signs of progress, after that."""


@dataclass(slots=True)
class Beat:
    """Last known progress of a rank."""

    phase: str = "starting"
    step: int = 0
    time: float = 0.0
    held: bool = False
    """Whether its process is held by SIGSTOP or a debugger."""


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.step, PHASES.index(beat.phase) if beat.phase in PHASES else 0


@dataclass(slots=True)
class Generation:
    """The ranks of one attempt, from their start to their end."""

    number: int
    placed: tuple[PlacedRank, ...]
    started: float
    way: Timings
    """The way to its first step, which began before it."""
    mends: bool = False
    """Whether it follows a failure."""
    ready: dict[int, dict[str, Any]] = field(default_factory=dict)
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    failures: dict[int, RankFailure] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    first_step_time: float | None = None
    resumed_step: int | None = None
    """Step of the checkpoint that the ranks went on from; 0: none; None: not known yet."""

    def __post_init__(self) -> None:
        self.beats = {entry.rank: Beat(time=self.started) for entry in self.placed}

    @property
    def all_done(self) -> bool:
        """Whether every rank has finished its work."""
        return len(self.done) == len(self.placed)

    @property
    def failed_step(self) -> int | None:
        """The step that was under way, None before the first."""
        return None if self.last_step is None else self.last_step + 1

    def node_of(self, rank: int) -> str:
        """Name of the node on which a rank lies."""
        return next(entry.node_name for entry in self.placed if entry.rank == rank)

    def identities(self) -> list[dict[str, Any]]:
        """Who the ranks are: rank, host, process, device, node. All must be ready."""
        found = []
        for rank, event in sorted(self.ready.items()):
            identity = {name: event.get(name) for name in ("host", "pid", "device")}
            found.append({"rank": rank, **identity, "node_id": event["report"].node_id})
        return found

    def note_event(self, rank: int, event: Mapping[str, Any]) -> None:
        """A rank's own event."""
        self.way.note(rank, event)
        kind = event["kind"]
        if kind == "ready":
            self.ready[rank] = dict(event)
        elif kind == "done":
            self.done[rank] = dict(event)
        elif kind == "resumed":
            self.resumed_step = event["step"]
        elif kind == "step":
            self.last_step = event["step"]
            if self.first_step is None:
                self.first_step, self.first_step_time = event["step"], event["time"]
        elif kind == "error" and rank not in self.failures:
            self.failures[rank] = RankFailure(
                rank,
                self.node_of(rank),
                event["time"],
                event["class"],
                event["message"],
                event.get("traceback", ""),
                event["step"] or None,
                event["phase"],
                evidence=event.get("evidence"),
            )

    def note_exit(self, message: Mapping[str, Any]) -> None:
        """A rank's process has ended, as its supervisor tells: rank, code, time, phase, step; `out_of_memory` when the
        kernel has killed processes for lack of memory just then."""
        rank, code = message["rank"], message["code"]
        self.gone.add(rank)
        if rank in self.done or rank in self.failures:
            return
        kind: FailureKind = "crash"
        words = exit_words(code)
        if message.get("out_of_memory") and code == -signal.SIGKILL:
            kind, words = "oom", "killed by the kernel, because the host ran out of memory"
        where = message["step"] or None, message["phase"]
        self.failures[rank] = RankFailure(
            rank, self.node_of(rank), message["time"], kind, words, "", *where, source="died"
        )

    def note_beats(self, beats: Mapping[int, tuple[str, int, float, bool]], now: float) -> None:
        """Heartbeats, as a supervisor forwards them: (phase, step, seconds since, held)."""
        for rank, (phase, step, age, held) in beats.items():
            self.beats[rank] = Beat(phase, step, now - age, held)

    def judgeable(self, now: float) -> bool:
        """Whether there are failures and the cause among them can be named."""
        if not self.failures:
            return False
        if any(not failure.consequence for failure in self.failures.values()):
            return True
        if len(self.failures.keys() | self.done.keys()) == len(self.placed):
            return True  # nobody is left who could name another cause
        return now - min(failure.time for failure in self.failures.values()) > _SETTLE_SECONDS

    def overdue(self, now: float, limits: Limits) -> RankFailure | None:
        """The rank that hangs, when one does: the one furthest behind, first held ones, then the longest silent.

        In a collective all ranks wait for one: it has the lowest step, is in the earliest phase of it, or has been
        silent the longest.
        """
        waiting = {rank: beat for rank, beat in self.beats.items() if rank not in self.done and rank not in self.gone}
        if not waiting:
            return None
        starting = self.first_step is None
        oldest = min(beat.time for beat in waiting.values())
        limit = limits.start_seconds if starting else limits.step_seconds
        silent = now - (self.started if starting else max(oldest, self.first_step_time or oldest))
        if silent < limit:
            return None
        rank, beat = min(waiting.items(), key=lambda item: (not item[1].held, *_progress(item[1]), item[1].time))
        return RankFailure(
            rank,
            self.node_of(rank),
            beat.time,
            "hang",
            self._hang_words(rank, beat, now, limit, starting),
            "",
            beat.step or None,
            beat.phase,
            source="silent",
        )

    def _hang_words(self, rank: int, beat: Beat, now: float, limit: float, starting: bool) -> str:
        quiet = f"no progress for {now - beat.time:.1f} s"
        key = "start_timeout_seconds" if starting else "step_timeout_seconds"
        text = f"{quiet} (fault_tolerance.{key}={limit:g})"
        if beat.held:
            text += "; its process is stopped (SIGSTOP, or a debugger)"
        others = [other for number, other in self.beats.items() if number != rank and number not in self.done]
        if others:
            ahead = max(others, key=lambda other: (other.step, other.time))
            text += f"; the furthest of the {len(others)} others: {ahead.phase}, step {ahead.step}"
        return text
