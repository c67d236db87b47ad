"""`summary.json`: how a run ended, what was predicted and what was measured. Pure but for reading the run's own files.

`build_summary` takes what the launcher knows (status, attempts, each rank's result) and what the run has recorded. What
is not known is null; nothing is made up from the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from orchestrator.plan.run_plan import RunPlan
from orchestrator.tracking.metrics_log import read_records
from orchestrator.tracking.rates import measured_pace, model_flops_utilization

Status = Literal["finished", "stopped", "failed"]


def build_summary(
    plan: RunPlan,
    *,
    run_directory: Path,
    status: Status,
    attempts: Sequence[Mapping[str, Any]],
    rank_results: Mapping[int, Mapping[str, Any]],
    checkpoint: str | None,
) -> dict[str, Any]:
    """The contract of `summary.json` (bytes, seconds, plain numbers).

    Args:
        plan: the plan of the last attempt.
        run_directory: the run's folder, with `metrics.jsonl`.
        status: how it ended.
        attempts: all attempts of all commands of the run (`RunDirectory.attempts()`).
        rank_results: `result` of each rank's `done` event, of the last attempt; empty if no rank got that far.
        checkpoint: path of the newest complete checkpoint.
    """
    records = read_records(run_directory / "metrics.jsonl", lists=False)
    step_seconds, tokens_per_second = measured_pace(records)
    mfu = model_flops_utilization(plan, tokens_per_second)
    memory = [rank_results[rank].get("peak_memory_bytes") for rank in sorted(rank_results)]
    known_memory = [value for value in memory if value is not None]
    return {
        "status": status,
        "steps": records[-1]["step"] if records else 0,
        "final_loss": _last(records, "loss"),
        "validation_loss": _last(records, "validation_loss"),
        "validation_nats_per_byte": _last(records, "validation_nats_per_byte"),
        "tokens": sum(int(record["tokens"]) for record in records),
        "tokens_per_second": tokens_per_second,
        "mfu": mfu,
        "peak_memory_bytes": memory,
        "attention_kernel": attention_kernels(rank_results) or _last(records, "attention_kernel"),
        "seconds_to_first_step": _first_known(rank_results, "seconds_to_first_step"),
        "attempts": [dict(attempt) for attempt in attempts],
        "predicted": predicted(plan),
        "measured": {
            "step_seconds": step_seconds,
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "peak_bytes": max(known_memory) if known_memory else None,
        },
        "mlflow_run_id": mlflow_run_id(run_directory),
        "checkpoint": checkpoint,
        "profile": files_in(run_directory, "profile", "rank-*.json.gz"),
        "out_of_memory": files_in(run_directory, "memory", "attempt-*-rank-*.json"),
    }


def attention_kernels(rank_results: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Which kernels of attention ran, over all ranks that had any; None: no rank has said."""
    named = {name for result in rank_results.values() for name in (result.get("attention_kernel") or "").split(", ")}
    return ", ".join(sorted(named - {""})) or None


def files_in(run_directory: Path, folder: str, pattern: str) -> list[str]:
    """What ranks have left in a folder of the run, as paths relative to the run's; empty where there is none."""
    return sorted(str(path.relative_to(run_directory)) for path in (run_directory / folder).glob(pattern))


def predicted(plan: RunPlan) -> dict[str, Any]:
    """What the plan said, under the names that the measured values have."""
    return {
        "step_seconds": plan.time.step_seconds,
        "tokens_per_second": plan.time.tokens_per_second,
        "mfu": plan.time.mfu,
        "peak_bytes": plan.memory.peak_bytes if plan.memory is not None else None,
    }


def mlflow_run_id(run_directory: Path) -> str | None:
    """Id of the run's MLflow run, once the forwarder has made or found it."""
    try:
        state = json.loads((run_directory / "tracking.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    run_id = state.get("run_id")
    return run_id if isinstance(run_id, str) else None


def _last(records: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((record[key] for record in reversed(records) if record.get(key) is not None), None)


def _first_known(rank_results: Mapping[int, Mapping[str, Any]], key: str) -> Any:
    known = (rank_results[rank].get(key) for rank in sorted(rank_results))
    return next((value for value in known if value is not None), None)
