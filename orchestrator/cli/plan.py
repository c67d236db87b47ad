"""`plan`: what a training would need, before anything is taken. No GPU, no Ray, no torch.

`--json` prints the contract of `RunPlan.to_dict()` and imports neither torch, ray nor rich; without it
`plan/explain.py` says the same for people. Exit 2 when the plan is not feasible.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.preflight import plan_of
from orchestrator.cli.show import page_console, print_problems
from orchestrator.errors import ConfigError
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.run_plan import SCHEMA_VERSION, CostPlan, RunPlan, TimePlan, TrafficPlan

HELP = """\
python -m orchestrator plan [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [--json]

Works out, without a GPU, without Ray and in about a second, what the training would need: layout, memory of each GPU by
category, time of a step, traffic, cost, which rank computes where, and every problem at once. It looks neither at
data, checkpoints and weights nor at the run's folder and the hardware at hand: the training does, before it starts.
Exit code 0: the plan is feasible; 2: it is not, or the configuration is refused.

  python -m orchestrator plan +experiment=llama7b_zero2
  python -m orchestrator plan +experiment=llama7b_zero2 parallel=zero3 training.micro_batch_size=4
  python -m orchestrator plan +experiment=llama70b_3d cluster=h100_80gb_16x8 --json
"""

FLAGS = ("--json",)


def run(invocation: Invocation) -> int:
    """Print the plan. Raises ConfigError when there is no configuration to plan."""
    try:
        plan = with_engine_warnings(plan_of(invocation))
    except ConfigError as error:
        if invocation.json:
            _print_json(_refused(error))
        raise
    if invocation.json:
        _print_json(plan.to_dict())
    else:
        from orchestrator.plan.explain import render

        render(plan, page_console())
    if plan.feasible:
        return 0
    if invocation.json:  # for whoever watches the program that reads; the page has shown them
        print_problems(plan.problems)
    return 2


def with_engine_warnings(plan: RunPlan) -> RunPlan:
    """The plan with a warning for each thing that the planner knows and today's engine cannot run."""
    if not plan.feasible:
        return plan
    later = tuple(f"`train` refuses this plan: {problem}" for problem in engine_problems(plan))
    return dataclasses.replace(plan, warnings=(*plan.warnings, *later))


def _refused(error: ConfigError) -> dict[str, Any]:
    """The JSON contract for a configuration that does not compose: problems, and null for all that was not computed."""
    return {
        "schema_version": SCHEMA_VERSION,
        "feasible": False,
        "profile": "ours",
        "config": None,
        "warnings": ["Nothing is computed while the configuration is refused."],
        "problems": [problem.to_dict() for problem in error.problems],
        **dict.fromkeys(("model", "parallel", "memory")),
        "time": dataclasses.asdict(TimePlan()),
        "traffic": dataclasses.asdict(TrafficPlan()),
        "cost": dataclasses.asdict(CostPlan()),
        "ranks": [],
    }


def _print_json(values: dict[str, Any]) -> None:
    json.dump(values, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
