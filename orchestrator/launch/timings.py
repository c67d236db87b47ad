"""Where the seconds until the first optimizer step went: marks in, consecutive parts out. Pure; clock readings come in.

The parts add up to the time from the user's command to the end of the first step. Importing torch runs beside Ray's
start; what shows as `warm-up` is only the rest of it that ranks had to wait for.
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
    """Marks of one launch."""

    def __init__(self, command_started: float) -> None:
        self._last = command_started
        self._parts: list[tuple[str, float]] = []
        self._closed = False

    def mark(self, part: str, now: float) -> None:
        """`part` ends now. A part that is named again grows."""
        if self._closed:
            return
        seconds = max(0.0, now - self._last)
        self._last = max(self._last, now)
        if self._parts and self._parts[-1][0] == part:
            seconds += self._parts.pop()[1]
        self._parts.append((part, seconds))

    def note(self, attempt: int, rank: int, event: Mapping[str, Any]) -> None:
        """An event of a rank; those of rank 0 in the first attempt divide the time."""
        if rank or attempt != 1 or self._closed:
            return
        if event["kind"] == "phase" and event["phase"] in _PHASE_PART:
            self.mark(_PHASE_PART[event["phase"]], event["time"])
        elif event["kind"] == "step":
            self.mark("first step", event["time"])
            self._closed = True

    def splits(self) -> tuple[tuple[str, float], ...]:
        """(part, seconds) in order; empty when no step was reached."""
        return tuple(self._parts) if self._closed else ()
