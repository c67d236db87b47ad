"""What a plan may ask for and today's engine cannot run yet, as a table that shrinks as the engine grows.

`train` refuses with these problems, `plan` shows them as warnings: the arithmetic of such a plan holds all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem
from orchestrator.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class Limit:
    """One setting and the values of it that the engine runs."""

    key: str
    value: Callable[[RunConfig, RunPlan], Any]
    runs: tuple[Any, ...]


LIMITS: tuple[Limit, ...] = (Limit("parallel.context", lambda config, plan: config.parallel.context, (1,)),)
"""Everything the engine does not run in every form; remove a line when it does."""


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def engine_problems(plan: RunPlan) -> tuple[Problem, ...]:
    """What of this plan the engine cannot run yet; empty when it can run all of it."""
    problems = []
    for limit in LIMITS:
        value = limit.value(plan.config, plan)
        if value not in limit.runs:
            allowed = " or ".join(f"{limit.key}={_shown(run)}" for run in limit.runs)
            problems.append(
                Problem(
                    limit.key,
                    f"{_shown(value)} can be planned, but this version of the engine does not run it yet.",
                    f"Use {allowed} to train; `plan` and `search` take it as it is.",
                )
            )
    return tuple(problems)
