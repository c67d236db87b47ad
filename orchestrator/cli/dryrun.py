"""`dryrun`: the engine's own code for one rank of each unlike role, without a GPU and without the other ranks.

Each rank is simulated in a process of its own (`engine/dryrun.py`, called by name, so that this file needs no torch);
the figures stand beside the planner's. Exit 2 when the plan, or the simulation, says that it cannot run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.preflight import plan_of
from orchestrator.cli.show import page_console, print_problems, print_warnings
from orchestrator.errors import PlanError, Problem, RunError
from orchestrator.plan.dryrun_problems import problems_of
from orchestrator.plan.dryrun_report import report
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.roles import Role, roles_of
from orchestrator.plan.run_plan import RunPlan
from orchestrator.tracking.dryruns import keep

HELP = """\
python -m orchestrator dryrun [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [--json]

Runs the engine's own set-up and step for one rank of each unlike role of the plan, on tensors that have shapes and
lifetimes but no numbers, and without the other ranks: tensor memory at the peak, collectives and FLOPs of a steady
step, each beside what the planner says. No GPU, no Ray; a 128-GPU plan takes a few minutes on two cores.
Exit code 0: it runs and fits; 2: it does not, or the configuration is refused.

  python -m orchestrator dryrun +experiment=llama7b_zero2
  python -m orchestrator dryrun +experiment=llama70b_3d training.activation_checkpointing=full
  python -m orchestrator dryrun +experiment=llama70b_3d --json
"""

FLAGS = ("--json",)

_ENGINE = "orchestrator.engine.dryrun"
_MOST_PROCESSES = 6
"""At once; each takes about 0.4 GiB."""
_TOO_SMALL = frozenset({"cluster.gpu.memory_gib", "cluster.host_memory_gib"})
"""Problems of the planner that say nothing against simulating: whether it fits is what is asked."""


def run(invocation: Invocation) -> int:
    """Simulate and print. Raises PlanError for a plan that cannot be simulated, RunError when a process dies."""
    plan = plan_of(invocation)
    against = [problem for problem in plan.problems if problem.key not in _TOO_SMALL]
    against += engine_problems(plan) if plan.parallel is not None else []
    if against:
        raise PlanError(against)
    print_warnings(() if invocation.json else plan.warnings)
    started = time.monotonic()
    found, differences = simulated(plan)
    told = report(plan, found, differences, time.monotonic() - started)
    problems = (*plan.problems, *problems_of(plan, told))
    told |= {"feasible": not problems, "problems": [problem.to_dict() for problem in problems]}
    kept = keep(plan, told)
    if invocation.json:
        json.dump(told, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        sys.stdout.flush()
    else:
        from orchestrator.plan.explain_dryrun import render_dryrun

        render_dryrun(plan.config.run.experiment, told, page_console())
        print(kept, flush=True)
    if problems:
        print_problems(problems)
        return 2
    return 0


def simulated(plan: RunPlan) -> tuple[list[tuple[Role, dict[str, Any]]], list[str]]:
    """What each unlike role does, by rank, and how the simulation differs from a real step. Raises RunError."""
    roles = roles_of(plan)
    found: dict[int, dict[str, Any]] = {}
    with _processes(len(roles)) as pool:
        differences: list[str] = pool.submit(_differences).result()
        waiting: dict[Future[dict[str, Any]], Role] = {pool.submit(_simulate, plan, role.rank): role for role in roles}
        try:
            for future in as_completed(waiting):
                role = waiting[future]
                found[role.rank] = future.result()
                _say(role, found[role.rank], len(found), len(roles))
        except BrokenProcessPool:
            missing = ", ".join(str(role.rank) for role in roles if role.rank not in found)
            raise RunError(_died(missing)) from None
    return [(role, found[role.rank]) for role in roles], differences


@contextmanager
def _processes(roles: int) -> Iterator[ProcessPoolExecutor]:
    # A warning of the fake process group that says nothing to anybody; read when torch is loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_ENGINE])
    most = min(roles, _MOST_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    pool = ProcessPoolExecutor(most, mp_context=context, max_tasks_per_child=1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _simulate(plan: RunPlan, rank: int) -> dict[str, Any]:
    engine = import_module(_ENGINE)
    values: dict[str, Any] = engine.plain(engine.simulate(plan, rank))
    return values


def _differences() -> list[str]:
    return list(import_module("orchestrator.engine.dryrun_stand_ins").DIFFERENCES)


def _say(role: Role, found: dict[str, Any], done: int, roles: int) -> None:
    what = f"failed while {found['failed_while']}" if found["failed_while"] else _gib(found["memory"])
    print(
        f"[{done}/{roles}] rank {role.rank} (pipeline {role.pipeline}): {what}, {found['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _gib(memory: dict[str, int]) -> str:
    return f"{sum(memory.values()) / 2**30:.2f} GiB"


def _died(ranks: str) -> Sequence[Problem]:
    return (
        Problem(
            "",
            f"A process that simulated one of the ranks {ranks} ended by itself; nothing is known of them.",
            "Most often the machine's memory was too small: each process needs about 0.5 GiB.",
        ),
    )
