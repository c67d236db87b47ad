"""What to do when something fails: `decide(state, event)`, pure. The clock's reading is in the event.

Knows neither Ray nor time nor processes. `loop.py` reports what happened, carries out the decision and keeps the state
that comes back. Each class of failures has a budget of its own, so that a preempted node costs no crash.

    running --crash, hang, no network, rewind--> RestartRanks   (same nodes, ranks forked anew)
    running --node lost, attempt failed--> Retry                (nodes chosen anew)
    running --preemption notice--> Retry, saving first
    running --user's error, out of memory, not a number, same step twice, budget spent--> Stop
    stopping --anything--> Stop
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orchestrator.config.schema import FaultToleranceConfig

FailureKind = Literal[
    "crash", "hang", "network", "node_loss", "preemption", "oom", "user", "nan", "attempt_failed", "placement"
]
"""`crash`: a rank died or raised; `hang`: no progress in time; `network`: ranks do not reach each other before the
first step; `node_loss`: a node or its supervisor is gone; `preemption`: a node is about to be taken away; `oom`: memory
ran out; `user`: the code or the configuration is wrong; `nan`: the loss is not a number, or a spike; `attempt_failed`:
Ray Train ended the attempt; `placement`: what ranks report differs from the table."""

_FINAL: dict[str, str] = {
    "user": "the same error would come again",
    "oom": "the same plan would run out of memory again",
}
_BUDGET_KEYS: dict[FailureKind, str] = {
    "crash": "max_restarts",
    "network": "max_restarts",
    "attempt_failed": "max_restarts",
    "placement": "max_restarts",
    "hang": "max_hangs",
    "node_loss": "max_node_losses",
    "preemption": "max_preemptions",
    "nan": "max_rewinds",
}
"""Class of failure -> the key of `fault_tolerance` that limits it. Classes with one key share its budget."""
_MENDED_IN_PLACE = ("crash", "hang", "network", "nan")
_BLAMED_ON_A_STEP = ("crash", "hang", "network")
"""Failures that may come from what a step does. A lost node says nothing about the step."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Something failed, or is about to."""

    kind: FailureKind
    step: int | None
    """Optimizer step at which it failed; None before the first one."""
    time: float
    """Clock reading, in seconds."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What is remembered between failures."""

    budgets: dict[str, int]
    """Times that each key of `_BUDGET_KEYS` allows."""
    on_nan: str = "stop"
    spent: dict[str, int] = field(default_factory=dict)
    """Times used, by key."""
    blamed_step: int | None = None
    """Step of the last failure that may come from a step; meaningful when `blamed`."""
    blamed: bool = False
    """Whether there was such a failure."""
    left_out: tuple[int, ...] = ()
    """Steps whose update is left out after a rewind."""
    stopping: bool = False
    """Whether the user asked the run to stop."""

    @staticmethod
    def of(tolerance: FaultToleranceConfig) -> PolicyState:
        """Before any failure. A budget that is not given is as large as `max_restarts`."""
        budgets = {key: getattr(tolerance, key) for key in dict.fromkeys(_BUDGET_KEYS.values())}
        default = tolerance.max_restarts
        return PolicyState(
            {key: default if value is None else value for key, value in budgets.items()}, tolerance.on_nan
        )

    @property
    def restarts(self) -> int:
        """Times that the run went on after a failure, of whatever class."""
        return sum(self.spent.values())


@dataclass(frozen=True, slots=True)
class RestartRanks:
    """End all ranks and fork them anew on the same shares."""

    state: PolicyState


@dataclass(frozen=True, slots=True)
class Retry:
    """End the attempt, choose nodes anew, begin another."""

    state: PolicyState
    save_first: bool = False
    """Whether the ranks can still save, and shall."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Give up, with the reason in words."""

    reason: str
    save_first: bool = False


Decision = RestartRanks | Retry | Stop


def decide(state: PolicyState, event: Failure) -> Decision:
    """What follows from `event`. A decision to go on carries the next state."""
    kind = event.kind
    if state.stopping:
        return Stop("it failed while it was being stopped")
    if kind in _FINAL:
        return Stop(_FINAL[kind])
    if kind == "nan" and state.on_nan == "skip":
        return Stop("too many steps in a row were left out")
    if kind == "nan" and (state.on_nan == "stop" or event.step is None):
        return Stop("fault_tolerance.on_nan is `stop`")
    if _crash_loop(state, event):
        where = "before the first step" if event.step is None else f"at step {event.step}"
        return Stop(f"it failed twice in a row {where}, without progress between")
    key = _BUDGET_KEYS[kind]
    used, allowed = state.spent.get(key, 0), state.budgets[key]
    if used >= allowed:
        return Stop(_spent_words(kind, used, f"fault_tolerance.{key}={allowed}"), save_first=kind == "preemption")
    after = replace(state, spent={**state.spent, key: used + 1})
    if kind in _BLAMED_ON_A_STEP:
        after = replace(after, blamed=True, blamed_step=event.step)
    if kind == "nan" and event.step is not None:
        after = replace(after, left_out=tuple(sorted({*state.left_out, event.step})))
    return RestartRanks(after) if kind in _MENDED_IN_PLACE else Retry(after, save_first=kind == "preemption")


def budget_words(state: PolicyState, kind: FailureKind) -> str:
    """How far the budget of a class is used, for the line about a restart: `restart 1 of 3`."""
    key = _BUDGET_KEYS[kind]
    name = {"max_hangs": "hang", "max_node_losses": "node loss", "max_preemptions": "preemption",
            "max_rewinds": "rewind"}.get(key, "restart")  # fmt: skip
    return f"{name} {state.spent.get(key, 0)} of {state.budgets[key]}"


def restart_event(decision: RestartRanks | Retry, kind: FailureKind, detail: str, *, attempt: int) -> dict[str, Any]:
    """The launcher's event that a failure is being mended, after `attempt` attempts."""
    what = "ranks" if isinstance(decision, RestartRanks) else "attempt"
    budget = budget_words(decision.state, kind)
    return {"kind": "restart", "what": what, "cause": kind, "message": detail, "attempt": attempt, "budget": budget}


def _spent_words(kind: FailureKind, used: int, key: str) -> str:
    if not used:
        return f"nothing of this kind is mended ({key})"
    times = "time" if used == 1 else "times"
    what = {"hang": "it hung and was restarted", "node_loss": "it lost nodes and was placed again",
            "preemption": "it was moved off nodes", "nan": "it was rewound"}.get(kind, "it was restarted")  # fmt: skip
    return f"{what} {used} {times} ({key})"


def _crash_loop(state: PolicyState, event: Failure) -> bool:
    return state.blamed and event.kind in _BLAMED_ON_A_STEP and event.step == state.blamed_step
