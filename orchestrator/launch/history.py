"""What a command gets to know of its attempts, for `summary.json`, MLflow and whoever watches. No ray, no clock.

An attempt is put into words when it is asked for, not when it ends: a failure on one node may be heard of before the
steps that another node had completed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.launch.generation import Generation
from orchestrator.launch.request import Attempt
from orchestrator.launch.timings import Timings

_COUNTED_LATE = ("resumed", "step", "validation", "checkpoint")
"""What ranks have done counts whenever it is heard of; nothing else follows from words of an attempt that is over."""
_NOT_TOLD = ("done", "error", "phase", "ready")


@dataclass(frozen=True, slots=True)
class _Ended:
    generation: Generation
    cause: str
    detail: str
    time: float


class History:
    """Attempts that have ended, in order, and the way to the next first step."""

    def __init__(self, observe: Callable[[dict[str, Any]], None], start: Timings) -> None:
        self._observe = observe
        self._ended: list[_Ended] = []
        self.way = start
        """To the first step of the attempt under way: from the command's start, or from the failure before it."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint that ranks of this command have reported."""

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """All of them, as far as is known now."""
        return tuple(_attempt(ended) for ended in self._ended)

    @property
    def count(self) -> int:
        """How many have ended."""
        return len(self._ended)

    @property
    def ended_in_failure(self) -> bool:
        """Whether the last attempt failed."""
        return bool(self._ended) and self._ended[-1].cause not in ("stopped", "finished")

    def close(
        self, generation: Generation | None, cause: str, detail: str, now: float, failed_at: float | None = None
    ) -> None:
        """Note the end of a generation, once; later words about it are consequences. The way to the next first step
        begins at `failed_at`, or `now`."""
        if generation is not None and self.count < generation.number:
            self._ended.append(_Ended(generation, cause, detail, now))
            self.way = Timings(now if failed_at is None else failed_at)
            self.way.mark("noticed", now)

    def note(self, generation: Generation, rank: int, event: dict[str, Any]) -> None:
        """A rank's own event, handed on to whoever watches."""
        generation.note_event(rank, event)
        kind = event["kind"]
        if kind == "checkpoint" and not event.get("error"):
            self.saved_step = event["step"]
        elif kind == "step" and generation.mends and event["step"] == generation.first_step:
            parts = dict(generation.way.splits())
            seconds = sum(parts.values())
            self._observe({"kind": "recovered", "seconds": seconds, "parts": parts, "attempt": generation.number})
        if kind not in _NOT_TOLD:
            self._observe({**event, "rank": rank, "attempt": generation.number})

    def hear_late(self, message: Mapping[str, Any]) -> None:
        """What a supervisor says of ranks whose attempt has ended."""
        if message["kind"] == "event" and message["event"]["kind"] in _COUNTED_LATE:
            for ended in self._ended:
                if ended.generation.number == message["generation"]:
                    self.note(ended.generation, message["rank"], message["event"])


def _attempt(ended: _Ended) -> Attempt:
    generation = ended.generation
    parts = dict(generation.way.splits()) if generation.mends else {}
    return Attempt(
        number=generation.number,
        cause=ended.cause,
        detail=ended.detail,
        first_step=generation.first_step,
        last_step=generation.last_step,
        seconds=ended.time - generation.started,
        world_size=len(generation.placed),
        recovery_seconds=sum(parts.values()) if parts else None,
        recovery_parts=parts,
        resumed_step=generation.resumed_step,
        nodes=tuple(dict.fromkeys(entry.node_name for entry in generation.placed)),
    )
