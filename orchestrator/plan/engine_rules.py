"""What a plan may ask for and today's engine cannot run yet, as a table that shrinks as the engine grows.

`train` refuses with these problems, `plan` shows them as warnings: the arithmetic of such a plan holds all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem
from orchestrator.plan.batch import nearest_multiples
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.validate.wording import one_of


@dataclass(frozen=True, slots=True)
class Limit:
    """One setting and the values of it that the engine runs."""

    key: str
    value: Callable[[RunConfig, RunPlan], Any]
    runs: tuple[Any, ...]
    beside: str = ""
    """The other setting without which it would run, for the message."""


LIMITS: tuple[Limit, ...] = (
    *(
        Limit(key, value, (0.0,), " beside parallel.tensor above 1")
        for key, value in (
            ("model.attention_dropout", lambda config, plan: _with_tensor(config, config.model.attention_dropout)),
            ("model.resid_pdrop", lambda config, plan: _with_tensor(config, config.model.resid_pdrop)),
        )
    ),
    Limit("parallel.context", lambda config, plan: config.parallel.context, (1,)),
)
"""Everything the engine does not run in every form; remove a line when it does."""


def _with_tensor(config: RunConfig, value: float) -> float:
    """Masks must be alike on what tensor ranks hold alike and differ elsewhere; one random stream cannot do both."""
    return value if config.parallel.tensor > 1 else 0.0


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
                    f"{_shown(value)}{limit.beside} can be planned, but this version of the engine does not run it "
                    "yet.",
                    f"Use {allowed} to train; `plan` and `search` take it as it is.",
                )
            )
    return (*problems, *_uneven_vocabulary(plan.config))


def _uneven_vocabulary(config: RunConfig) -> Iterator[Problem]:
    """Rows that tensor ranks cut unevenly and ZeRO cuts again: torch 2.13 then mistakes where a rank's rows begin."""
    rows, tensor = config.model.vocab_size, config.parallel.tensor
    if config.parallel.zero_stage == 0 or rows % tensor == 0:
        return
    yield Problem(
        "model.vocab_size",
        f"{rows} rows do not divide over parallel.tensor={tensor}, and ZeRO cuts each part again: this version of the "
        "engine does not run that.",
        f"Use {one_of(nearest_multiples(rows, tensor))}, or parallel.zero_stage=0.",
    )
