"""A simulated plan beside the planned one: every role's figures, the differences, the worst rank and whether it fits.

Values in, values out; the shape of `dryrun --json` is `report()`. Who simulates is `engine/dryrun.py`, who prints
`explain_dryrun.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.plan.planned_rank import CATEGORIES, PlannedRank, planned_rank
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.roles import Role
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.work import work_of

SCHEMA_VERSION = 1
_STEP_KEYS = ("sequence_length", "micro_batch_size", "precision", "activation_checkpointing", "gradient_clip")
_AXES = {"tensor": "tensor", "pipeline": "pipeline", "data": "data", "replicas": "data"}
"""Axis of the planner's traffic by counted axis; the others (`tied`, `all`) it leaves out."""
_HANDED_IN = frozenset({"all_gather", "reduce_scatter", "all_reduce", "send"})
"""Kinds that the planner counts; what is received was sent by another."""


def plan_hash(plan: RunPlan) -> str:
    """Which plan a report is about: a hash of all that a simulated step depends on, so not of lengths and names."""
    config = plan.config.to_dict()
    told = {
        "model": config["model"],
        "parallel": plan.to_dict()["parallel"],
        "engine": {name: config["parallel"][name] for name in ("offload", "sequence_parallel")},
        "training": {name: config["training"][name] for name in _STEP_KEYS},
        "optimizer": {name: config["optimizer"][name] for name in ("name", "momentum")},
        "device": config["cluster"]["device"],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def report(
    plan: RunPlan, ranks: Sequence[tuple[Role, Mapping[str, Any]]], differences: Sequence[str], seconds: float
) -> dict[str, Any]:
    """The JSON contract of `dryrun`:

    ```
    {"schema_version": 1, "plan_hash": str, "feasible": bool, "problems": [{"key", "message", "fix"}],
     "differences": [str], "seconds": float, "capacity_bytes": int,
     "worst": {"rank", "simulated_bytes", "reserve_bytes", "total_bytes", "planned_bytes", "difference"} | null,
     "ranks": [{"rank", "pipeline", "place": "first" | "last", "stands_for", "micro_batches": [int], "seconds",
                "resident_bytes", "failed_while", "error",
                "memory": {category | "total": {"simulated_bytes", "planned_bytes", "difference"}},
                "between_steps_bytes", "reserve_bytes", "host_bytes": {"simulated", "planned"},
                "collectives": [{"axis", "kind", "calls", "bytes"}],
                "traffic": {axis: {"simulated_bytes", "planned_bytes", "simulated_calls", "planned_calls",
                                   "difference"}},
                "flops": {"simulated", "planned", "difference"}}]}
    ```

    `difference` is (simulated - planned) / planned, null where nothing is planned. `memory` is the device's at the
    instant of the peak, without the reserve; `bytes` of collectives are what the rank hands in.
    """
    assert plan.memory is not None, "a plan without degrees is not simulated"
    entries = [_entry(plan, role, found) for role, found in ranks]
    sound = [entry for entry in entries if not entry["failed_while"]]
    worst = max(sound, key=lambda entry: _total(entry) + entry["reserve_bytes"], default=None)
    return {
        "schema_version": SCHEMA_VERSION,
        "plan_hash": plan_hash(plan),
        "feasible": plan.feasible,
        "problems": [problem.to_dict() for problem in plan.problems],
        "differences": list(differences),
        "seconds": seconds,
        "capacity_bytes": plan.memory.capacity_bytes,
        "worst": None if worst is None else _worst(plan, worst),
        "ranks": entries,
    }


def _total(entry: Mapping[str, Any]) -> int:
    total: int = entry["memory"]["total"]["simulated_bytes"]
    return total


def _worst(plan: RunPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    assert plan.memory is not None
    planned = plan.memory.pipeline_ranks[entry["pipeline"]].total_bytes or 0
    total = _total(entry) + entry["reserve_bytes"]
    return {
        "rank": entry["rank"],
        "simulated_bytes": _total(entry),
        "reserve_bytes": entry["reserve_bytes"],
        "total_bytes": total,
        "planned_bytes": planned,
        "difference": difference(total, planned),
    }


def _entry(plan: RunPlan, role: Role, found: Mapping[str, Any]) -> dict[str, Any]:
    planned = planned_rank(plan, role.pipeline)
    memory = {
        name: _beside(found["memory"].get(name, 0), planned.memory[name], "_bytes")
        for name in CATEGORIES
        if found["memory"].get(name, 0) or planned.memory[name]
    }
    total = sum(found["memory"].values())
    memory["total"] = _beside(total, sum(planned.memory.values()), "_bytes")
    assert plan.parallel is not None
    reserve = profile_named(plan.profile).reserve_bytes(work_of(plan.config, plan.parallel), total)
    return {
        "rank": role.rank,
        "pipeline": role.pipeline,
        "place": role.place,
        "stands_for": role.stands_for,
        **{name: found[name] for name in ("seconds", "resident_bytes", "failed_while", "error")},
        "micro_batches": list(found["micro_batches"]),
        "memory": memory,
        "between_steps_bytes": sum(found["between_steps"].values()),
        "reserve_bytes": round(reserve),
        "host_bytes": {"simulated": found["host_bytes"], "planned": planned.host_bytes},
        "collectives": list(found["collectives"]),
        "traffic": _traffic(found["collectives"], planned),
        "flops": _beside(found["flops"], planned.flops, ""),
    }


def _traffic(collectives: Sequence[Mapping[str, Any]], planned: PlannedRank) -> dict[str, dict[str, Any]]:
    counted: dict[str, list[int]] = {axis: [0, 0] for axis in planned.collectives}
    for entry in collectives:
        axis = _AXES.get(entry["axis"])
        if axis is not None and entry["kind"] in _HANDED_IN:
            counted[axis][0] += entry["bytes"]
            counted[axis][1] += entry["calls"]
    return {
        axis: {
            "simulated_bytes": counted[axis][0],
            "planned_bytes": size,
            "simulated_calls": counted[axis][1],
            "planned_calls": calls,
            "difference": difference(counted[axis][0], size),
        }
        for axis, (size, calls) in planned.collectives.items()
        if counted[axis][0] or size
    }


def _beside(simulated: int, planned: int, unit: str) -> dict[str, Any]:
    return {
        f"simulated{unit}": simulated,
        f"planned{unit}": planned,
        "difference": difference(simulated, planned),
    }


def difference(simulated: float, planned: float) -> float | None:
    """By how much the simulated figure is larger, relative to the planned one; None where nothing is planned."""
    return None if planned == 0 else (simulated - planned) / planned
