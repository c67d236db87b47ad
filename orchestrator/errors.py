"""The error tree of the project.

Each error carries `Problem`s: what was asked, why it cannot be, what to change. A user's mistake is one of these and
never a traceback; `cli/main.py` prints them and maps each class to an exit code. Nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in the user's own terms."""

    key: str
    """Dotted configuration key at fault, for example `parallel.tensor`; empty when no single key is."""
    message: str
    """What was asked and why it cannot be."""
    fix: str
    """What to change, with the nearest values that work."""

    def to_dict(self) -> dict[str, str]:
        """The problem as the JSON contract writes it: key, message, fix."""
        return asdict(self)

    def __str__(self) -> str:
        where = f"{self.key}: " if self.key else ""
        return f"{where}{self.message}" + (f" {self.fix}" if self.fix else "")


class OrchestratorError(Exception):
    """Base of every error that a user can cause or must act on."""

    exit_code = 3

    def __init__(self, problems: Sequence[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = (Problem("", problems, ""),)
        elif isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ConfigError(OrchestratorError):
    """The configuration does not compose or does not fit the schema. Nothing was started."""

    exit_code = 2


class PlanError(OrchestratorError):
    """The configuration is well formed, but no such plan is possible or it does not fit. Nothing was started."""

    exit_code = 2


class PlacementError(OrchestratorError):
    """The plan cannot be placed on the hardware at hand. Nothing was started."""

    exit_code = 2


class RunError(OrchestratorError):
    """A run that had started failed."""

    exit_code = 3
