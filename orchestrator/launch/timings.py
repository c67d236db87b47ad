"""Where the seconds until a first optimizer step went: marks in, consecutive parts out. Pure; clock readings come in.

The same words for the start of a command and for the way back to work after a failure, so that the two can be
compared. A start begins with `imports` (the command's own) and `ray`, a way back with `noticed` (from the failure, or
from the last sign of life of a rank that hangs) and `killed`. Where nodes are chosen both have `waiting` (unless they
held the plan at once), `nodes` (looked at and chosen), `workers` and `warm-up` (the rest of importing torch that ranks
had to wait for; most of it runs beside Ray's start). Then comes what the ranks go through. The parts add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PHASE_PART = {
    "rendezvous": "engine imports",
    "building": "process group",
    "loading": "model",
    "reading": "data and checkpoint",
}
"""Phase that rank 0 enters -> name of the part that ends there."""


class Timings:
    """Marks on the way to one first step."""

    def __init__(self, began: float) -> None:
        """`began` is the command's start, or the failure that is being mended."""
        self._last = began
        self._parts: dict[str, float] = {}
        self._closed = False

    def mark(self, part: str, now: float) -> None:
        """`part` ends now. A part that is named again grows."""
        if not self._closed:
            self._parts[part] = self._parts.get(part, 0.0) + max(0.0, now - self._last)
            self._last = max(self._last, now)

    def note(self, rank: int, event: Mapping[str, Any]) -> None:
        """An event of a rank; those of rank 0 divide the time."""
        if rank or self._closed:
            return
        if event["kind"] == "phase" and event["phase"] in _PHASE_PART:
            self.mark(_PHASE_PART[event["phase"]], event["time"])
        elif event["kind"] == "step":
            self.mark("first step", event["time"])
            self._closed = True

    def splits(self) -> tuple[tuple[str, float], ...]:
        """(part, seconds) in order; empty when no step was reached."""
        return tuple(self._parts.items()) if self._closed else ()
