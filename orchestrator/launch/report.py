"""One message for a thousand ranks: which failure came first, and which are only its consequences. Pure.

When a rank dies, its neighbours' collectives fail within milliseconds with errors of their own, often sooner than the
death itself is noticed. So failures are sorted by what they are before they are sorted by time.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.launch.policy import FailureKind

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

    @property
    def consequence(self) -> bool:
        """Whether it reads like the effect of another rank's failure."""
        return self.source == "raised" and self.kind == "crash" and bool(_CONSEQUENCE.search(self.message))


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
    network may not.
    """
    from orchestrator.errors import OrchestratorError

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
