"""What to run after memory ran out: the next plan that fits when every byte of a plan costs as much more as it did.

Pure. The planner's figures were too low for this model on this hardware, by a factor that the failure shows; a plan is
looked for whose figures leave room for the same factor. Refuses to change what is learned: `search.py` does as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.schema import RunConfig
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.search import search
from orchestrator.plan.search_space import asked_for, overrides
from orchestrator.plan.validate.wording import gib

_LEAST_EXCESS = 1.05
"""Where nothing was measured: whatever failed needed more than the card holds, by at least this much."""
_MOST_TRIED = 50
"""Ranked plans that are looked at; the engine may refuse the first of them."""


def excess(plan: RunPlan, measured: Mapping[str, int], planned: Mapping[str, int]) -> float:
    """How many times the planned bytes were needed, at least.

    `measured` and `planned` are bytes by category when memory ran out; empty where nobody could measure.
    """
    peak = plan.memory.peak_bytes if plan.memory else None
    full = plan.memory.capacity_bytes / peak * _LEAST_EXCESS if plan.memory and peak else _LEAST_EXCESS
    seen = sum(measured.values()) / sum(planned.values()) if sum(planned.values()) else 0.0
    return max(full, seen, _LEAST_EXCESS)


def worst_category(measured: Mapping[str, int], planned: Mapping[str, int]) -> str | None:
    """The category that exceeded its planned bytes by most; None when none did by more than a hundredth of the plan."""
    over = {name: size - planned.get(name, 0) for name, size in measured.items()}
    name = max(over, key=lambda category: over[category], default=None)
    return name if name is not None and over[name] > sum(planned.values()) / 100 else None


def next_plan_words(plan: RunPlan, factor: float) -> str:
    """A sentence that names the fastest plan which fits with `factor` times its planned bytes, or that none does."""
    config = plan.config
    smaller = _with_memory(config, config.cluster.gpu.memory_gib / factor)
    found = search(smaller)
    for ranked in found.ranked[:_MOST_TRIED]:
        tried = make_plan(asked_for(config, ranked.candidate))
        if tried.feasible and not engine_problems(tried) and _words(config, tried.config):
            words = " ".join(overrides(config, ranked.candidate))
            peak = tried.memory.peak_bytes if tried.memory else None
            need = f" (planned {gib(peak)}, {gib(peak * factor)} with the same excess)" if peak else ""
            return f"The next plan that fits: {words}{need}."
    return (
        f"No plan of this model on these GPUs leaves room for {factor:.2f} times its planned memory: use more GPUs, or "
        "a smaller training.sequence_length."
    )


def _words(config: RunConfig, other: RunConfig) -> bool:
    return config.parallel != other.parallel or config.training != other.training


def _with_memory(config: RunConfig, memory_gib: float) -> RunConfig:
    gpu = config.cluster.gpu.model_copy(update={"memory_gib": memory_gib})
    groups = tuple(
        group.model_copy(update={"gpu": group.gpu.model_copy(update={"memory_gib": memory_gib})})
        for group in config.cluster.node_groups
    )
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu": gpu, "node_groups": groups})})
