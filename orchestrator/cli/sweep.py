"""`train -m`: one run for every combination of the values given. All are checked before the first one starts.

`KEY=1,2`, `KEY=range(1,4)`, `KEY=choice(a,b)` and `GROUP=glob(llama*)` are Hydra's; everything else is shared.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.preflight import RefusedError, plan_to_run
from orchestrator.errors import Problem
from orchestrator.plan.run_plan import RunPlan

MOST_JOBS = 1000
"""A sweep above this is more likely a slip than a wish."""


def train_all(invocation: Invocation, started: float) -> int:
    """Train every job in turn; a stop ends the sweep, a failure does not. Returns the first exit code that is not 0."""
    from orchestrator.cli.train import train

    jobs = expand(invocation)
    plans = checked(invocation, jobs)
    first_bad = 0
    for number, (words, plan) in enumerate(zip(jobs, plans, strict=True), start=1):
        own = " ".join(word for word in words if word not in invocation.overrides)
        print(f"--- {number} of {len(jobs)}: {own}", flush=True)
        one = Invocation(overrides=list(words), config_directory=invocation.config_directory)
        code = train(plan, one, started if number == 1 else time.time())
        first_bad = first_bad or code
        if code == 4:
            break
    return first_bad


def expand(invocation: Invocation) -> list[tuple[str, ...]]:
    """The overrides of every job. Raises RefusedError for a sweep that is none or far too large."""
    from orchestrator.config import locate
    from orchestrator.config.overrides import sweep_values

    directory = Path(invocation.config_directory) if invocation.config_directory else None
    columns: list[Sequence[str]] = []
    for word in invocation.overrides:
        values = sweep_values(word, lambda group: locate.options(group, directory))
        if values == ():
            raise RefusedError(
                [Problem("-m", f"`{word}` matches no option.", "Widen the pattern, or name the options.")]
            )
        columns.append(values or (word,))
    count = 1
    for column in columns:
        count *= len(column)
    if count > MOST_JOBS:
        raise RefusedError(
            [Problem("-m", f"The sweep has {count:,} jobs, more than {MOST_JOBS:,}.", "Sweep over less.")]
        )
    return list(itertools.product(*columns))


def checked(invocation: Invocation, jobs: Sequence[tuple[str, ...]]) -> list[RunPlan]:
    """The plan of every job. Raises RefusedError with the problems of all jobs, each problem once."""
    plans: list[RunPlan] = []
    problems: dict[Problem, list[int]] = {}
    for number, words in enumerate(jobs, start=1):
        try:
            plans.append(plan_to_run(invocation, words))
        except RefusedError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(number)
    if not problems:
        return plans
    raise RefusedError([_of_jobs(problem, numbers, jobs) for problem, numbers in problems.items()])


def _of_jobs(problem: Problem, numbers: Sequence[int], jobs: Sequence[tuple[str, ...]]) -> Problem:
    if len(numbers) == len(jobs):
        return problem
    first = " ".join(jobs[numbers[0] - 1])
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return Problem(problem.key, f"(job {numbers[0]}: {first}{more}) {problem.message}", problem.fix)
