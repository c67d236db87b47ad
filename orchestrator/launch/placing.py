"""Finding nodes for the next attempt: what can never fit is refused at once, what does not fit now is waited for.

After nodes were lost the plan of the beginning comes first again, then the smaller one that the run went on with; when
neither fits for long enough since the loss was noticed, a plan for what remains is made (`plan/replan.py`). Waiting has
a visible reason and a limit. Knows no Ray: the nodes, the time and whoever begins an attempt come in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from orchestrator.config.schema import FaultToleranceConfig
from orchestrator.errors import PlacementError, PlanError, Problem
from orchestrator.placement.shares import choose_shares, fits_when_free, usable_nodes
from orchestrator.placement.topology import Node, need_of
from orchestrator.plan.replan import Replanned, replan
from orchestrator.plan.run_plan import RunPlan

_AGAIN_SECONDS = 1.0
"""Between two looks at what is free."""
_SOON_SECONDS = 0.2
"""The same while what the attempt before has held is being freed."""
_QUIET_SECONDS = 2.0
"""How long that may take, and how long whatever is in the way is not spoken of."""


class Placeable(Protocol):
    """An attempt that has not begun."""

    def begin(self, nodes: Sequence[Node]) -> None:
        """Choose among `nodes` and begin; raises `PlacementError` when they do not hold the plan."""


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
        self._since: float | None = None  # patience counts from here: the loss was noticed, or the first look
        self._held: Mapping[str, int] = {}
        self._first_look: float | None = None
        self._last_look = 0.0
        self._settled = False
        self._over = math.inf
        self._told = ""
        self.waited = False
        """Whether the nodes did not hold the plan at the first look."""
        self.plan = plan
        """The plan of the attempt that was begun last."""

    def again(self, noticed: float, held: Mapping[str, int]) -> None:
        """Nodes were lost or left, which was noticed then: begin to look anew, with patience for their return. `held`
        are the slots that the attempt before had on each of its nodes."""
        self._lost, self._since, self._held = True, noticed, held
        self._first_look, self._told = None, ""

    def attempt(
        self, now: float, see: Callable[[], Sequence[Node]], make: Callable[[RunPlan], AttemptT]
    ) -> AttemptT | None:
        """Look at the nodes, once; the attempt when it has begun. Raises `PlacementError` when waiting is no use, or is
        over."""
        if self._first_look is None:
            self._first_look, self._over = now, math.inf
            self._since = now if self._since is None else self._since
        elif not self._due(now):
            return None
        self.waited = now > self._first_look
        self._last_look = now
        nodes = see()
        self._settled = now - self._first_look >= _QUIET_SECONDS or (self._lost and self._freed(nodes))
        candidates = [self._asked]
        if self.plan is not self._asked and self._settled:
            candidates.append(self.plan)
        refusal: PlacementError | None = None
        for plan in candidates:
            tried = make(plan)
            try:
                tried.begin(nodes)
            except PlacementError as error:
                refusal = refusal or error
                continue
            if self.plan is not plan:
                self.plan = plan
                self._tell_grown()
            return tried
        assert refusal is not None
        return self._later(now, refusal, nodes, make)

    def _due(self, now: float) -> bool:
        """Whether it is time for another look: every second, and when patience ends."""
        pause = _SOON_SECONDS if self._lost and not self._settled else _AGAIN_SECONDS
        return self._last_look < self._over <= now or now - self._last_look >= pause

    def _freed(self, nodes: Sequence[Node]) -> bool:
        """Whether all is free again that the attempt before has held on nodes that are still there."""
        there = [node for node in nodes if not node.silent and not node.leaving]
        return all(node.slots_free >= self._held.get(node.node_id, 0) for node in there)

    def _later(
        self, now: float, refusal: PlacementError, nodes: Sequence[Node], make: Callable[[RunPlan], AttemptT]
    ) -> AttemptT | None:
        """Wait, or go on with less. Raises `refusal` when neither is allowed."""
        assert self._since is not None
        busy = fits_when_free(nodes, need_of(self._asked))
        if not busy and not self._lost:
            raise refusal
        patience = self._tolerance.placement_timeout_seconds
        then = ""
        if self._lost and self._tolerance.replan_after_seconds is not None:
            then = ", then the run goes on with fewer data ranks"
            if not busy:
                patience = self._tolerance.replan_after_seconds
        self._over = self._since + patience
        reason = refusal.problems[0].message
        if now < self._over or (self._lost and not self._settled):
            self._tell_waiting(reason, patience, then)
            return None
        if not then:
            raise refusal
        remain = usable_nodes(nodes, need_of(self._asked))
        try:
            found = replan(self._asked, [node.slots_free for node in remain])
        except PlanError as error:
            limit = self._tolerance.placement_timeout_seconds
            if now < self._since + limit and _holds_less(self._asked, [node.slots_total for node in remain]):
                self._tell_waiting(reason, limit, "")
                return None
            lost = Problem("cluster", "nodes are gone, and what remains holds no plan with the same model split.", "")
            raise PlacementError([lost, *error.problems]) from error
        return self._smaller(found, reason, nodes, make)

    def _smaller(
        self, found: Replanned, reason: str, nodes: Sequence[Node], make: Callable[[RunPlan], AttemptT]
    ) -> AttemptT:
        """The attempt of a plan for what is free now."""
        tried = make(found.plan)
        tried.begin(nodes)
        self.plan = found.plan
        self._tell_replanned(found.plan, reason, list(found.changes), _idle(nodes, found.plan))
        return tried

    def _tell_waiting(self, reason: str, limit: float, then: str) -> None:
        if reason != self._told and self._settled:
            self._told = reason
            self._observe({"kind": "waiting", "reason": reason, "limit_seconds": limit, "then": then})

    def _tell_grown(self) -> None:
        assert self.plan.parallel is not None
        self._tell_replanned(self.plan, "", [f"parallel.data {self.plan.parallel.data}, as asked"], {})

    def _tell_replanned(self, plan: RunPlan, reason: str, changes: list[str], idle: dict[str, int]) -> None:
        assert plan.parallel is not None
        event = {"reason": reason, "changes": changes, "idle": idle, "world_size": plan.parallel.world_size}
        self._observe({"kind": "replanned", **event, "plan": plan.to_dict()})


def _holds_less(plan: RunPlan, slots: Sequence[int]) -> bool:
    """Whether these slots hold `plan` with fewer data ranks."""
    try:
        replan(plan, slots)
    except PlanError:
        return False
    return True


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
