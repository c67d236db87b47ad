"""The list of all rules, and the two functions that run them.

`check(facts)` gives every problem, `warn(facts)` everything that works but deserves a word. To add a rule, write it
in the module of its subject and name it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.errors import Problem
from orchestrator.plan.facts import Facts
from orchestrator.plan.validate import (
    batch_rules,
    gpu_rules,
    model_rules,
    notices,
    pipeline_rules,
    profile_rules,
    split_rules,
)

Rule = Callable[[Facts], Iterable[Problem]]

RULES: tuple[Rule, ...] = (
    *model_rules.RULES,
    *gpu_rules.RULES,
    *split_rules.RULES,
    *pipeline_rules.RULES,
    *batch_rules.RULES,
    *profile_rules.RULES,
)


def check(facts: Facts) -> tuple[Problem, ...]:
    """Every problem of the configuration, in the order of the rules."""
    return tuple(problem for rule in RULES for problem in rule(facts))


def warn(facts: Facts) -> tuple[str, ...]:
    """What works but deserves a word."""
    return tuple(text for notice in notices.NOTICES for text in notice(facts))
