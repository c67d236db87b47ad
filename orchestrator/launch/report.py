"""One message for a thousand ranks: which failure came first, and which are only its consequences. Pure.

When a rank dies, its neighbours' collectives fail within milliseconds with errors of their own, often sooner than the
death itself is noticed. So failures are sorted by what they are before they are sorted by time.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from orchestrator.launch.policy import FailureKind
from orchestrator.placement.topology import PlacedRank
from orchestrator.plan.after_oom import excess, next_plan_words, worst_category
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.validate.wording import gib

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|socket closed|timed out waiting|"
    r"store.*(closed|reset|timeout)|nccl.*(remote|abort|unhandled system)|remote process exited|"
    r"timed? ?out.*(collective|recv|send|all_?reduce|barrier)|watchdog",
    re.IGNORECASE | re.DOTALL,
)
"""What gloo, NCCL and the store say on ranks that did nothing wrong."""

_RANKS_SPELLED_OUT = 6


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What one rank met."""

    rank: int
    node: str
    time: float
    kind: FailureKind
    message: str
    """One line: `ValueError: ...`, or `killed by SIGKILL`."""
    traceback: str = ""
    step: int | None = None
    phase: str = ""
    source: Literal["raised", "died", "silent"] = "raised"
    """`raised`: it reported an exception; `died`: its process ended by itself; `silent`: no progress in time."""
    evidence: Mapping[str, Any] | None = None
    """What the rank measured when it failed; of `oom` `categories`, `planned` (bytes), `worst_category`, `snapshot`."""

    @property
    def consequence(self) -> bool:
        """Whether it reads like the effect of another rank's failure."""
        if self.source != "raised":
            return False
        return self.kind == "network" or (self.kind == "crash" and bool(_CONSEQUENCE.search(self.message)))


def first_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure to act on: the earliest that is not a consequence, or the earliest of all."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def describe(failures: Sequence[RankFailure]) -> str:
    """All failures as one line, the cause on top, like ones grouped, consequences counted."""
    cause = first_cause(failures)
    alike = [f for f in failures if f is not cause and not f.consequence and f.message == cause.message]
    different: dict[str, list[RankFailure]] = defaultdict(list)
    for failure in failures:
        if failure is not cause and failure not in alike and not failure.consequence:
            different[failure.message].append(failure)
    consequences = [f for f in failures if f is not cause and f.consequence]
    text = f"{_ranks([cause, *alike])} on {cause.node}{_where(cause)}: {cause.message}"
    for message, group in different.items():
        text += f"; also {_ranks(group)}: {message}"
    if consequences:
        text += f"; {_ranks(consequences)} then lost the connection"
    return text


def memory_words(failure: RankFailure) -> str:
    """Which category of memory exceeded the plan, from what the rank measured; empty when it measured nothing."""
    evidence = failure.evidence or {}
    measured, planned = evidence.get("categories") or {}, evidence.get("planned") or {}
    name = evidence.get("worst_category") or worst_category(measured, planned)
    text = ""
    if name in measured:
        text = f"{name} took {gib(measured[name])}, planned {gib(planned.get(name, 0))}"
    elif measured:
        text = f"no category exceeded the plan ({gib(sum(measured.values()))} in all)"
    if evidence.get("snapshot"):
        text += f"{'; ' if text else ''}the memory snapshot is {evidence['snapshot']}"
    return text


def error_line(error: BaseException | None) -> str:
    """How an attempt on Ray ended, in one line: the class of its error and the last line of its text."""
    if error is None:
        return "its workers returned"
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__


def leaving_words(placed: Sequence[PlacedRank], nodes: Iterable[str], reason: str) -> str:
    """Which nodes are about to be taken away, by name where ranks lie on them, and who says so."""
    gone = set(nodes)
    names = sorted({entry.node_name for entry in placed if entry.node_id in gone}) or sorted(gone)
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} about to be taken away ({reason})"


def node_list(ids: Iterable[str]) -> str:
    """`node a`, `nodes a, b`."""
    names = sorted(ids)
    return f"node{'s' * (len(names) > 1)} {', '.join(names)}"


def remedy(kind: FailureKind, failures: Sequence[RankFailure], plan: RunPlan, logs: str) -> str:
    """What to do about a failure that ends the run; `logs` is where the ranks' output lies."""
    text = f"The ranks' output is in {logs}."
    if kind != "oom":
        return text
    cause = first_cause(failures) if failures else None
    evidence = (cause.evidence if cause else None) or {}
    measured, planned = evidence.get("categories") or {}, evidence.get("planned") or {}
    words = memory_words(cause) if cause else ""
    return f"{words}. " * bool(words) + f"{next_plan_words(plan, excess(plan, measured, planned))} {text}"


def exit_words(code: int) -> str:
    """A process's end in words: `code` as in `subprocess` (negative: a signal)."""
    if code >= 0:
        return f"ended with exit code {code}" if code else "ended without finishing its work"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": " (by hand, or by the kernel when the machine ran out of memory: see `dmesg`)",
        "SIGSEGV": " (a crash in native code: the rank's log has the stack)",
        "SIGABRT": " (a crash in native code: the rank's log has the stack)",
    }.get(name, "")
    return f"killed by {name}{hint}"


def classify(error: BaseException) -> FailureKind:
    """The class of an exception that a rank raised.

    An error in the code or the configuration comes again however often it is retried; one of the system or of the
    network may not. An error that knows its class says so in `failure_kind`.
    """
    from orchestrator.errors import OrchestratorError

    known = getattr(error, "failure_kind", None)
    if known in get_args(FailureKind):
        return cast(FailureKind, known)

    name = type(error).__name__
    text = str(error)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text:
        return "oom"
    if isinstance(error, FloatingPointError):
        return "nan"
    programming = (
        ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError,
        SyntaxError, TypeError, ValueError,
    )  # fmt: skip
    if isinstance(error, (OrchestratorError, *programming, FileNotFoundError, PermissionError)):
        return "user"
    return "crash"


def _ranks(failures: Sequence[RankFailure]) -> str:
    ranks = sorted(failure.rank for failure in failures)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _RANKS_SPELLED_OUT:
        return "ranks " + ", ".join(map(str, ranks))
    return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"


def _where(failure: RankFailure) -> str:
    if not failure.phase:
        return ""
    return f", {failure.phase}" + (f", step {failure.step}" if failure.step else "")
