"""Everything that can be known to be wrong before anything starts, found in one go.

Configuration, plan, hardware, engine, data, run folder and tracking are each asked; none stops the others. Raises
`RefusedError` with all that was said, or returns the plan to run. Starts nothing and leaves no trace.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.live import ask_cluster
from orchestrator.cli.show import print_warnings
from orchestrator.config import job_paths
from orchestrator.config.paths import with_absolute_paths
from orchestrator.errors import ConfigError, Problem
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan
from orchestrator.tracking.identity import problems_of_asked_name


class RefusedError(ConfigError):
    """A command is refused. `besides` are problems found with the settings at fault left out."""

    def __init__(self, problems: Sequence[Problem], besides: Sequence[Problem] = ()) -> None:
        super().__init__([*problems, *besides])
        self.besides = len(besides)


def plan_of(invocation: Invocation, overrides: Sequence[str] | None = None) -> RunPlan:
    """The plan of what was typed, feasible or not. Raises RefusedError when there is no configuration to plan."""
    from orchestrator.config.compose import examine

    words = invocation.overrides if overrides is None else overrides
    examined = examine(
        words, config_directory=invocation.config_directory, ask_cluster=ask_cluster(invocation.config_directory)
    )
    problems = [*invocation.problems, *examined.problems]
    if examined.config is not None:
        problems += problems_of_asked_name(examined.config)
        if not problems:
            return make_plan(examined.config)
    sound = examined.config or examined.remainder()
    raise RefusedError(problems, () if sound is None else _new(make_plan(sound).problems, problems))


def plan_to_run(invocation: Invocation, overrides: Sequence[str] | None = None) -> RunPlan:
    """The plan of what was typed, ready to be launched here and now. Raises RefusedError with everything against it."""
    from orchestrator.config.compose import examine

    words = invocation.overrides if overrides is None else overrides
    examined = examine(
        words, config_directory=invocation.config_directory, ask_cluster=ask_cluster(invocation.config_directory)
    )
    problems = [*invocation.problems, *examined.problems]
    config = examined.config or examined.remainder()
    if config is None:
        raise RefusedError(problems)
    if job_paths.in_a_job(os.environ):
        problems += [*job_paths.output_problems(config), *job_paths.tracking_problems(config, os.environ)]
    plan = make_plan(with_absolute_paths(config, Path.cwd()))
    later = _new(problems_before_start(plan, invocation.words("plan", words)), problems)
    if not problems and not later:
        return plan
    raise RefusedError(problems, later) if problems else RefusedError(later)


def problems_before_start(plan: RunPlan, plan_command: str) -> tuple[Problem, ...]:
    """All that speaks against starting this plan on this machine, in the order of the user's interest.

    `plan_command` is what to type to see the plan without its hardware.
    """
    from orchestrator.checkpoint.destination import check_destination
    from orchestrator.checkpoint.start import check_length, check_start
    from orchestrator.data.check import check_data
    from orchestrator.launch.hardware import check_hardware
    from orchestrator.tracking.destination import check_tracking
    from orchestrator.tracking.identity import checkpoint_directory
    from orchestrator.tracking.run_directory import check_run_directory, upcoming_run

    config = plan.config
    # The room that knows the hardware knows the experiment, not what else was typed.
    short = f"python -m orchestrator plan +experiment={config.run.experiment}"
    here = check_hardware(plan, lambda warning: print_warnings((warning,)))
    found = [*plan.problems, *(replace(problem, fix=problem.fix.replace(short, plan_command)) for problem in here)]
    if plan.feasible:
        found += engine_problems(plan)
    if warning := job_paths.stop_warning(config, os.environ):
        print_warnings((warning,))
    found += check_data(config)
    of_folder = check_run_directory(config)
    found += [*of_folder, *check_start(config)]
    if not any(problem.key.startswith("run.") for problem in of_folder):
        run, continues = upcoming_run(config)
        checkpoints = checkpoint_directory(config, run)
        of_place = check_destination(config, checkpoints, continues=continues)
        found += of_place or check_length(config, checkpoints)
    found += check_tracking(config, os.environ, Path.cwd())
    return tuple(_new(found, ()))


def _new(found: Iterable[Problem], known: Iterable[Problem]) -> list[Problem]:
    """Each problem once, without those that are known."""
    seen = set(known)
    kept = []
    for problem in found:
        if problem not in seen:
            seen.add(problem)
            kept.append(problem)
    return kept
