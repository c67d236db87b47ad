"""`verify`: a plan, made small, against one process of plain torch. Loss, every gradient, the norm, the weights.

Each reduction (`plan/reduce.py`) trains on gloo processes with the engine's own code (`verify_rank.py`), and once in
plain torch (`verify_reference.py`), in FP64 and in the plan's own types (`verify_case.py`). Judges nothing itself: the
`Report` says how far apart they are and whether that is within the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.engine import verify_processes
from orchestrator.engine.verify_case import Case, cases_of, global_batches, recipe_of, samples_of
from orchestrator.engine.verify_compare import Outcome, compare, initial_weights
from orchestrator.engine.verify_rank import run_cases
from orchestrator.engine.verify_reference import DESCRIPTION, Trace, train
from orchestrator.plan.reduce import Reduction, reductions
from orchestrator.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class Verified:
    """One reduction and what its comparisons came to."""

    reduction: Reduction
    outcomes: tuple[Outcome, ...]

    @property
    def agrees(self) -> bool:
        """Whether all of them agree."""
        return all(outcome.agrees for outcome in self.outcomes)


def verify(plan: RunPlan, *, mistake: Callable[[], Any] = nullcontext) -> Iterator[Verified]:
    """Verify each reduction of a feasible plan that the engine runs, one after the other.

    `mistake` is a context that every rank works in, for tests that plant faults. Raises PlanError if the plan cannot be
    reduced, RanksFailedError (a RunError) if a rank fails.
    """
    found = reductions(plan)
    verify_processes.warm_up()
    torch.set_num_threads(1)
    for reduction in found:
        yield verified(reduction, mistake=mistake)


def verified(reduction: Reduction, *, mistake: Callable[[], Any] = nullcontext) -> Verified:
    """Train one reduction on its ranks and in the reference, and compare."""
    cases = cases_of(reduction)
    ranks = verify_processes.run_on_ranks(reduction.axes.world_size, _on_rank, cases, mistake)
    outcomes = []
    for index, case in enumerate(cases):
        initial = initial_weights(case)
        outcomes.append(compare(case, [found[index] for found in ranks], initial, reference_trace(case, initial)))
    return Verified(reduction, tuple(outcomes))


def reference_trace(case: Case, initial: dict[str, torch.Tensor]) -> Trace:
    """What plain torch makes of a case."""
    return train(case.plan.config.model, initial, global_batches(case, samples_of(case)), recipe_of(case))


def _on_rank(cases: tuple[Case, ...], mistake: Callable[[], Any], *, beat: Callable[[str], None]) -> Any:
    return run_cases(cases, beat, mistake)


def to_dict(plan: RunPlan, found: list[Verified]) -> dict[str, Any]:
    """What `verify --json` prints: plain values; null for a difference that is not a number."""
    return {
        "schema_version": 1,
        "agrees": all(one.agrees for one in found),
        "reference": DESCRIPTION,
        "experiment": plan.config.run.experiment,
        "problems": [],
        "reductions": [_reduction_dict(one) for one in found],
    }


def _reduction_dict(one: Verified) -> dict[str, Any]:
    axes = one.reduction.axes
    return {
        "agrees": one.agrees,
        "processes": axes.world_size,
        "axes": {name: getattr(axes, name) for name in ("pipeline", "replicate", "shard", "tensor")},
        "precision_of_the_plan": one.reduction.precision,
        "changes": [
            {"key": change.key, "plan": change.asked, "reduced": change.reduced} for change in one.reduction.changes
        ],
        "comparisons": [_outcome_dict(outcome) for outcome in one.outcomes],
    }


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "title": outcome.title,
        "agrees": outcome.agrees,
        "first_loss": outcome.losses[0],
        "last_loss": outcome.losses[1],
        "steps_clipped": outcome.clipped,
        "a_data_rank_without_valid_tokens": outcome.empty,
        "broken": list(outcome.broken),
        "differences": {
            difference.what.replace(" ", "_"): {
                "value": difference.value if math.isfinite(difference.value) else None,
                "limit": difference.limit,
                "where": difference.where,
                "agrees": difference.agrees,
            }
            for difference in outcome.differences
        },
    }
