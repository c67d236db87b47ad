"""Ranks that hold the others up without failing: who needs much longer for its own work than the middle of all. Pure.

A rank's own work is what it does without waiting for others (`RankLink.pace`): reading its samples, and the forward
pass where that contains no collective. Names a rank, never acts on it: a slow rank makes progress and is no hang.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

FACTOR = 2.0
"""Times the median from which a rank counts as slow."""
_LEAST_SECONDS = 0.05
"""Difference to the median below which nobody cares."""
_STEPS = 10
"""Steps over which a rank must be slow: one long step is a hiccup."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank."""

    rank: int
    own_seconds: float
    """Median of its own work over the last steps."""
    median_seconds: float
    """The same of the middle rank."""


class Stragglers:
    """Collects the pace of all ranks of one generation."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._step: dict[int, int] = {}
        self._named: set[int] = set()

    def note(self, paces: Mapping[int, float], steps: Mapping[int, int]) -> None:
        """Own seconds and step of some ranks; a step counts once."""
        for rank, seconds in paces.items():
            if seconds > 0 and steps.get(rank) != self._step.get(rank):
                self._step[rank] = steps.get(rank, 0)
                self._recent.setdefault(rank, deque(maxlen=_STEPS)).append(seconds)

    def slow(self) -> list[Straggler]:
        """Ranks that have become slow; each is named once until it recovers."""
        pace = {rank: statistics.median(recent) for rank, recent in self._recent.items() if len(recent) == _STEPS}
        if len(pace) < 2:
            return []
        middle = statistics.median_low(pace.values())  # of two ranks the faster one
        slow = {
            rank for rank, seconds in pace.items() if seconds > FACTOR * middle and seconds - middle > _LEAST_SECONDS
        }
        found = [Straggler(rank, pace[rank], middle) for rank in sorted(slow - self._named)]
        self._named = slow
        return found
