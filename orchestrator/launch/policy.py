"""What to do when something fails: `decide(state, event)`, pure. The clock's reading is in the event.

Knows neither Ray nor time nor processes. `run.py` reports what happened, carries out the decision and keeps the state
that comes back. Restarting ranks in place and trying again on newly chosen nodes share one budget, `max_restarts`.

    running --crash, hang--> RestartRanks   (same nodes, ranks forked anew)
    running --share lost, attempt failed--> Retry   (nodes chosen anew)
    running --user's error, out of memory, not a number, same step twice, budget spent--> Stop
    stopping --anything--> Stop
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

FailureKind = Literal["crash", "hang", "user", "oom", "nan", "share_lost", "attempt_failed", "placement"]
"""`crash`: a rank died or raised; `hang`: no progress in time; `user`: the code or the configuration is wrong;
`oom`: memory ran out; `nan`: the loss is not a number; `share_lost`: a supervisor or its node is gone;
`attempt_failed`: Ray Train ended the attempt; `placement`: what ranks report differs from the table."""

_FINAL: dict[str, str] = {
    "user": "the same error would come again",
    "oom": "the same plan would run out of memory again",
    "nan": "fault_tolerance.on_nan is `stop`",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Something failed."""

    kind: FailureKind
    step: int | None
    """Optimizer step at which it failed; None before the first one."""
    time: float
    """Clock reading, in seconds."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What is remembered between failures."""

    max_restarts: int
    restarts: int = 0
    last_failed_step: int | None = None
    """Step of the last failure; meaningful when `restarts` > 0."""
    stopping: bool = False
    """Whether the user asked the run to stop."""


@dataclass(frozen=True, slots=True)
class RestartRanks:
    """End all ranks and fork them anew on the same shares."""

    state: PolicyState


@dataclass(frozen=True, slots=True)
class Retry:
    """End the attempt, choose nodes anew, begin another."""

    state: PolicyState


@dataclass(frozen=True, slots=True)
class Stop:
    """Give up, with the reason in words."""

    reason: str


Decision = RestartRanks | Retry | Stop


def decide(state: PolicyState, event: Failure) -> Decision:
    """What follows from `event`. A decision to go on carries the next state."""
    if state.stopping:
        return Stop("it failed while it was being stopped")
    if event.kind in _FINAL:
        return Stop(_FINAL[event.kind])
    if _crash_loop(state, event):
        where = "before the first step" if event.step is None else f"at step {event.step}"
        return Stop(f"it failed twice in a row {where}, without progress between")
    if state.restarts >= state.max_restarts:
        times = "time" if state.restarts == 1 else "times"
        return Stop(f"it was restarted {state.restarts} {times} (fault_tolerance.max_restarts={state.max_restarts})")
    after = replace(state, restarts=state.restarts + 1, last_failed_step=event.step)
    return RestartRanks(after) if event.kind in ("crash", "hang") else Retry(after)


def _crash_loop(state: PolicyState, event: Failure) -> bool:
    # A lost node says nothing about the step, so it does not count towards a crash loop.
    return state.restarts > 0 and event.kind in ("crash", "hang") and event.step == state.last_failed_step
