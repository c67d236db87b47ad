"""What is looked at now and then while ranks run: the cluster's word on their nodes, and who is slow. No ray, no clock.

`loop.py` asks with the time; asking the cluster costs a call to its head, so that is done every few seconds only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from orchestrator.launch.stragglers import Straggler, Stragglers

if TYPE_CHECKING:
    from orchestrator.launch.ray_attempt import NodeTrouble

_NODES_EVERY_SECONDS = 2.0
_PACE_EVERY_SECONDS = 5.0


class Watch:
    """Remembers when it last looked, which nodes are known to go, and which may be lost."""

    def __init__(self) -> None:
        self.leaving: frozenset[str] = frozenset()
        """Nodes that are about to be taken away: nothing is placed on them any more."""
        self.doubted: frozenset[str] = frozenset()
        """Nodes of attempts that lost some of theirs: each is asked itself before anything is placed on it again."""
        self._nodes_at: float | None = None
        self._pace_at: float | None = None
        self._stragglers = Stragglers()

    def begin(self) -> None:
        """New ranks start: what was known of the old ones' pace is nothing to them."""
        self._stragglers = Stragglers()

    def note_leaving(self, nodes: Mapping[str, object]) -> frozenset[str]:
        """Nodes are about to be taken away; those of which that was not known yet."""
        new = frozenset(nodes) - self.leaving
        self.leaving |= new
        return new

    def note_doubt(self, nodes: Iterable[str]) -> None:
        """An attempt on these nodes has lost some of them. Which ones need not be known, and may not be: they vanish
        one after the other, or fall silent with their lines unbroken."""
        self.doubted |= frozenset(nodes)

    def note_paces(self, paces: Mapping[int, float], steps: Mapping[int, int]) -> None:
        """Seconds of each rank's own work, and its step."""
        self._stragglers.note(paces, steps)

    def stragglers(self, now: float) -> list[Straggler]:
        """Ranks that have become slow since the last look."""
        if self._pace_at is not None and now - self._pace_at < _PACE_EVERY_SECONDS:
            return []
        self._pace_at = now
        return self._stragglers.slow()

    def trouble(self, now: float, ask: Callable[[], NodeTrouble]) -> NodeTrouble | None:
        """The cluster's word on the nodes when it is time to ask again, else None."""
        if self._nodes_at is not None and now - self._nodes_at < _NODES_EVERY_SECONDS:
            return None
        self._nodes_at = now
        return ask()
