"""Rates of a run: tokens per second and model FLOP/s utilisation. Pure arithmetic on plans and records.

The convention is the plan's own: `flops_per_token` = 6 x matrix-product parameters + 12 x layers x hidden x sequence,
without recompute and without halving for the causal mask. Where no peak is known (a CPU), MFU is None, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from orchestrator.config.schema import ClusterConfig, GpuConfig, Precision
from orchestrator.plan.run_plan import RunPlan

_TERA = 1e12


def peak_flops_of(gpu: GpuConfig, precision: Precision) -> float | None:
    """Dense matrix-product peak of one GPU in FLOP/s for what a training precision computes in; None: not known."""
    peaks = {"fp32": gpu.peak_tflops.fp32, "fp16_mixed": gpu.peak_tflops.fp16}
    tera = peaks.get(precision, gpu.peak_tflops.bf16)
    return None if tera is None else tera * _TERA


def cluster_peak_flops(cluster: ClusterConfig, precision: Precision, world_size: int) -> float | None:
    """Peak of all GPUs that a run uses, in FLOP/s; None where a kind's peak is not known.

    A run waits for its slowest rank, so among unlike nodes each rank counts with the smallest peak.
    """
    kinds = [group.gpu for group in cluster.node_groups] or [cluster.gpu]
    peaks = [peak_flops_of(gpu, precision) for gpu in kinds]
    known = [peak for peak in peaks if peak is not None]
    return min(known) * world_size if len(known) == len(peaks) else None


def model_flops_utilization(plan: RunPlan, tokens_per_second: float | None) -> float | None:
    """Model FLOP/s over the peak of the GPUs in use (0 to 1), or None where the peak is not known.

    Args:
        plan: the plan that runs.
        tokens_per_second: of the whole run, over all ranks.
    """
    if tokens_per_second is None or plan.model is None or plan.parallel is None:
        return None
    peak = cluster_peak_flops(plan.config.cluster, plan.config.training.precision, plan.parallel.world_size)
    return None if peak is None else plan.model.flops_per_token * tokens_per_second / peak


def steady_records(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of a run's pace: without the first step of each attempt, which pays for allocation and warm-up, and
    without profiled ones.

    If nothing else was recorded, those are all there is and are returned.
    """
    all_records = [record for record in records if record.get("step_seconds") is not None]
    seen: set[Any] = set()
    steady = []
    for record in all_records:
        if record.get("attempt") in seen and not record.get("profiled"):
            steady.append(record)
        seen.add(record.get("attempt"))
    return steady or all_records


def measured_pace(records: Iterable[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """(median seconds of a step, tokens per second over all steady steps), each None if no step was recorded."""
    steady = steady_records(records)
    if not steady:
        return None, None
    seconds = [float(record["step_seconds"]) for record in steady]
    total = sum(seconds)
    tokens = sum(int(record["tokens"]) for record in steady)
    return median(seconds), tokens / total if total > 0 else None
