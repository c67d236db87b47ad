"""Finding nodes for the next attempt: what can never fit is refused at once, what does not fit now is waited for.

After nodes were lost the plan of the beginning comes first again, then the smaller one that the run went on with; when
neither fits for long enough, a plan for what remains is made (`plan/replan.py`). Waiting has a visible reason and a
limit. Knows no Ray: an attempt is begun by the caller's function, the time comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from orchestrator.config.schema import FaultToleranceConfig
from orchestrator.errors import PlacementError, PlanError, Problem
from orchestrator.placement.shares import choose_shares, fits_when_free, usable_nodes
from orchestrator.placement.topology import Node, need_of
from orchestrator.plan.replan import Replanned, replan
from orchestrator.plan.run_plan import RunPlan

_AGAIN_SECONDS = 1.0
"""Between two looks at what is free."""
_QUIET_SECONDS = 2.0
"""What an attempt before has held is free again within about a second; nobody needs to hear of that."""


class Placeable(Protocol):
    """An attempt that has not begun."""

    def nodes(self) -> tuple[Node, ...]:
        """The cluster's nodes, with what is free on them now."""

    def begin(self) -> None:
        """Choose nodes and begin; raises `PlacementError` when they do not hold the plan."""


AttemptT = TypeVar("AttemptT", bound=Placeable)


class Placing(Generic[AttemptT]):
    """Tries to begin an attempt until it can, the limit passes, or it turns out that it never will."""

    def __init__(
        self, plan: RunPlan, tolerance: FaultToleranceConfig, observe: Callable[[dict[str, Any]], None]
    ) -> None:
        self._asked = plan
        self._tolerance = tolerance
        self._observe = observe
        self._lost = False
        self._since: float | None = None
        self._last_try = 0.0
        self._told = ""
        self.plan = plan
        """The plan of the attempt that was begun last."""

    def again(self) -> None:
        """Nodes were lost or left: begin to look anew, with patience for their return."""
        self._lost, self._since, self._told = True, None, ""

    def attempt(self, now: float, make: Callable[[RunPlan], AttemptT]) -> AttemptT | None:
        """Try once; the attempt when it has begun. Raises `PlacementError` when waiting is no use, or is over."""
        if self._since is None:
            self._since = now
        elif now - self._last_try < _AGAIN_SECONDS:
            return None
        self._last_try = now
        waited = now - self._since
        candidates = [self._asked]
        if self.plan is not self._asked and waited >= _QUIET_SECONDS:
            candidates.append(self.plan)
        refusal: PlacementError | None = None
        for plan in candidates:
            tried = make(plan)
            try:
                tried.begin()
            except PlacementError as error:
                refusal = refusal or error
                continue
            if self.plan is not plan:
                self.plan = plan
                self._tell_grown()
            return tried
        assert refusal is not None
        return self._later(waited, refusal, tried.nodes(), make)

    def _later(
        self, waited: float, refusal: PlacementError, nodes: Sequence[Node], make: Callable[[RunPlan], AttemptT]
    ) -> AttemptT | None:
        busy = fits_when_free(nodes, need_of(self._asked))
        if not busy and not self._lost:
            raise refusal
        patience = self._tolerance.placement_timeout_seconds
        then = ""
        if self._lost and self._tolerance.replan_after_seconds is not None:
            then = ", then the run goes on with fewer data ranks"
            if not busy:
                patience = max(self._tolerance.replan_after_seconds, _QUIET_SECONDS)
        if waited < patience:
            reason = refusal.problems[0].message
            if reason != self._told and waited >= _QUIET_SECONDS:
                self._told = reason
                self._observe({"kind": "waiting", "reason": reason, "limit_seconds": patience, "then": then})
            return None
        if not then:
            raise refusal
        return self._smaller(nodes, make)

    def _smaller(self, nodes: Sequence[Node], make: Callable[[RunPlan], AttemptT]) -> AttemptT | None:
        """An attempt of a plan for what is free now. Raises `PlacementError` when there is none."""
        free = {node.node_id: node.slots_free for node in usable_nodes(nodes, need_of(self._asked))}
        try:
            found = replan(self._asked, list(free.values()))
        except PlanError as error:
            lost = Problem("cluster", "nodes are gone, and what remains holds no plan with the same model split.", "")
            raise PlacementError([lost, *error.problems]) from error
        tried = make(found.plan)
        try:
            tried.begin()
        except PlacementError:
            return None  # taken by others since `nodes` were read
        self.plan = found.plan
        self._tell_smaller(found, _idle(nodes, found.plan))
        return tried

    def _tell_smaller(self, found: Replanned, idle: dict[str, int]) -> None:
        assert found.plan.parallel is not None
        self._observe(
            {"kind": "replanned", "changes": list(found.changes), "idle": idle, "plan": found.plan.to_dict(),
             "world_size": found.plan.parallel.world_size}
        )  # fmt: skip

    def _tell_grown(self) -> None:
        assert self.plan.parallel is not None
        self._observe(
            {"kind": "replanned", "changes": [f"parallel.data {self.plan.parallel.data}, as asked"], "idle": {},
             "plan": self.plan.to_dict(), "world_size": self.plan.parallel.world_size}
        )  # fmt: skip


def _idle(nodes: Sequence[Node], plan: RunPlan) -> dict[str, int]:
    """Free slots by node that the plan leaves idle; nodes of one name get their id behind it."""
    need = need_of(plan)
    choice = choose_shares(nodes, need)
    names = [node.name for node in nodes]
    idle: dict[str, int] = {}
    for node in usable_nodes(nodes, need):
        left = node.slots_free - choice.node_ids.count(node.node_id) * choice.share_size
        if left > 0:
            name = node.name if names.count(node.name) == 1 else f"{node.name} ({node.node_id[:8]})"
            idle[name] = left
    return idle
