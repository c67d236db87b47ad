"""Waiting for nodes that others hold now, with a visible reason and a limit; what can never fit is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.errors import PlacementError
from orchestrator.launch.ray_attempt import RayAttempt
from orchestrator.placement.shares import fits_when_free
from orchestrator.placement.topology import need_of
from orchestrator.plan.run_plan import RunPlan

_AGAIN_SECONDS = 1.0
"""Between two looks at what is free."""
_QUIET_SECONDS = 2.0
"""What an attempt before has held is free again within about a second; nobody needs to hear of that."""


class PlacementWait:
    """Tries to begin an attempt until it can, the limit passes, or it turns out that it never will."""

    def __init__(self, plan: RunPlan, limit_seconds: float) -> None:
        self._plan = plan
        self._limit_seconds = limit_seconds
        self._since: float | None = None
        self._last_try = 0.0
        self._told = ""

    def attempt(self, now: float, attempt: RayAttempt, observe: Callable[[dict[str, Any]], None]) -> bool:
        """Try once; True when the attempt has begun. Raises `PlacementError` when waiting is no use, or is over."""
        if self._since is None:
            self._since = now
        elif now - self._last_try < _AGAIN_SECONDS:
            return False
        self._last_try = now
        try:
            attempt.begin()
        except PlacementError as error:
            waited = now - self._since
            if not fits_when_free(attempt.nodes(), need_of(self._plan)) or waited >= self._limit_seconds:
                raise
            reason = error.problems[0].message
            if reason != self._told and waited >= _QUIET_SECONDS:
                self._told = reason
                observe({"kind": "waiting", "reason": reason, "limit_seconds": self._limit_seconds})
            return False
        return True
