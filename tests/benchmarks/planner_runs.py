"""Whole training runs, Llama-3-405B and measured all-reduces against the planner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.plan.collectives import Group, collective_seconds
from orchestrator.plan.constants import FITTED
from orchestrator.plan.device import Device
from orchestrator.plan.memory import memories_of
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.step_seconds import step_seconds
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.work import Work
from tests.benchmarks.planner_rows import (
    GpuSpec,
    Inexpressible,
    Row,
    facts_of_row,
    gpu_of,
    number,
    read_rows,
    work_of_row,
)
from tests.benchmarks.planner_speed import SpeedCase, predicted_rate

_DEFAULT_GPUS = 1024
_DEFAULT_BATCH_TOKENS = 4 * 2**20
_MONTHS_AFTER_RELEASE = 24.0
"""Runs carry no date; two years after the GPU came out is the middle of its use."""


@dataclass(frozen=True, slots=True)
class Run:
    """A published training run beside the planner's."""

    row: Row
    published_hours: float | None
    """GPU-hours."""
    predicted_hours: float
    gpus: int
    assumed: str

    @property
    def predicted_days(self) -> float:
        """Days on the run's GPUs."""
        return self.predicted_hours / self.gpus / 24.0

    @property
    def error(self) -> float | None:
        """Relative error of GPU-hours, or of days where only those are published."""
        published = self.published_hours
        if published is None and self.row["days"]:
            published = float(self.row["days"]) * 24.0 * self.gpus
        return None if published is None else self.predicted_hours / published - 1.0


def training_runs(directory: Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """Every run of `pretrain_runs.csv` whose model's sizes are in some table of the folder."""
    sizes = list(_known_sizes(directory))
    runs, unexpressed = [], []
    for row in read_rows(directory, "pretrain_runs.csv"):
        try:
            runs.append(_run(row, sizes))
        except (Inexpressible, KeyError, ValueError) as error:
            unexpressed.append((row["row_id"], str(error)))
    return runs, unexpressed


def _known_sizes(directory: Path) -> Iterator[Row]:
    for row in read_rows(directory, "perf_*.csv"):
        yield row
    for row in read_rows(directory, "param_counts.csv"):
        yield {**row, "params": row["exact_params"] or row["formula_params"]}


def _sizes_of(row: Row, sizes: list[Row]) -> Row:
    """Sizes by exact parameter count, or by the model's name."""
    for known in sizes:
        if known["params"] and float(known["params"]) == float(row["params"]):
            return known
    for known in sizes:
        same = known["layers"] == row["layers"] and known["hidden"] == row["hidden"]
        if same and known["model"].split("@")[0] == row["model"].split(" ")[0]:
            return known
    raise Inexpressible(f"sizes of {row['model']} are in no table of this folder")


def _run(row: Row, sizes: list[Row]) -> Run:
    known = _sizes_of(row, sizes)
    spec, gpus = gpu_of(row), number(row, "n_gpus", _DEFAULT_GPUS)
    tensor, pipeline = number(row, "tp", 1), number(row, "pp", 1)
    sequence = number(row, "seq_len", 2048)
    gpus = gpus // (tensor * pipeline) * tensor * pipeline
    data = gpus // (tensor * pipeline)
    batch = max(1, round(number(row, "global_batch_tokens", _DEFAULT_BATCH_TOKENS) / sequence / data)) * data
    megatron = "megatron_core" if spec.name.startswith("H") else "megatron_deepspeed"
    profile = profile_named(megatron if tensor * pipeline > 1 else "fsdp2_compiled")
    plan = {
        **known,
        "kind": "pretrain_run",
        "seq_len": str(sequence),
        "gpu": row["gpu"],
        "n_gpus": str(gpus),
        "tp": str(tensor),
        "pp": str(pipeline),
        "cp": "1",
        "dp": str(data),
        "vpp": "",
        "zero_stage": str(number(row, "zero_stage", 3 if tensor * pipeline == 1 else 1)),
        "micro_batch": "1",
        "global_batch": str(batch),
        "precision": "bf16",
        "recompute": "",
        "seq_parallel": "1" if profile.fused_attention else "0",
        "framework": "NeMo" if profile.name == "megatron_core" else "torchtitan FSDP2 +compile",
    }
    work = _fitting(plan, profile, spec)
    device = _device(spec, 400.0 if spec.name.startswith("H") else 200.0)
    seconds = step_seconds(work, profile, device)
    if seconds is None:
        raise Inexpressible("a rate of the hardware is not known")
    rate = work.tokens_per_step / seconds.step / gpus
    hours = float(row["tokens"]) / rate / 3600.0
    published = float(row["gpu_hours"]) if row["gpu_hours"] else None
    assumed = f"{profile.name}, {gpus} GPUs, TP {tensor}, PP {pipeline}, micro-batch 1, recompute {work.recompute}"
    return Run(row, published, hours, gpus, assumed)


def _fitting(plan: Row, profile: SystemProfile, spec: GpuSpec) -> Work:
    """The run's work with the least recomputation that fits its GPUs."""
    work = work_of_row({**plan, "recompute": "none"})
    work = replace(work, parallel=facts_of_row(plan))
    for recompute in ("none", "cheap", "full"):
        work = replace(work, recompute=recompute)
        if max(memory.total_bytes or 0 for memory in memories_of(work, profile)) <= spec.memory_gib * 2**30:
            break
    return work


def _device(spec: GpuSpec, network_gbps: float) -> Device:
    return Device(
        peak_flops=spec.peak,
        attention_flops=spec.peak,
        memory_rate=spec.memory_rate,
        node_rate=spec.nvlink,
        network_rate=network_gbps * 1e9 / 8,
        host_rate=spec.host_rate,
        gpus_per_node=8,
        age_months=_MONTHS_AFTER_RELEASE,
    )


@dataclass(frozen=True, slots=True)
class Llama405:
    """The published and the predicted throughput of Llama-3-405B."""

    published: float
    predicted: float
    cut: str


def llama_405b(cases: list[SpeedCase]) -> Iterator[Llama405]:
    """Rows of the Llama 3 paper, with the cut that was assumed."""
    for case in cases:
        if case.row["kind"] != "llama3_paper":
            continue
        facts = case.work.parallel
        counts = [end - first for first, end in facts.stage_layers]
        cut = (
            f"{facts.world_size} GPUs: TP {facts.tensor}, CP {facts.context}, PP {facts.pipeline}, DP {facts.data}, "
            f"ZeRO-{facts.zero_stage}; {facts.schedule} with {facts.virtual_stages} stages a rank, first {counts[0]}, "
            f"last {counts[-1]}, others {max(counts)} layers; {facts.micro_batches} micro-batches of "
            f"{case.work.micro_batch_size}; recompute {case.work.recompute}"
        )
        yield Llama405(case.measured, predicted_rate(case, FITTED) or 0.0, cut)


_LINKS = {
    "H200": (450e9, 50e9),
    "B200": (900e9, 50e9),
    "V100": (150e9, 12.5e9),
    "A100": (300e9, 6.25e9),
}
"""NVLink and network rate a GPU of the clusters in `allreduce.csv`, bytes/s (the latter from the table's own names)."""


def all_reduce_errors(directory: Path) -> Iterator[tuple[Row, float]]:
    """(row, relative error of the predicted bus bandwidth) of every measured all-reduce."""
    for row in read_rows(directory, "allreduce.csv"):
        link = next((rates for name, rates in _LINKS.items() if row["hw"].startswith(name)), None)
        if link is None:
            continue
        ranks, per_node = number(row, "n_ranks"), number(row, "gpus_per_node")
        device = Device(None, None, None, link[0], link[1], None, per_node)
        payload = float(row["payload_bytes"])
        seconds = collective_seconds("all_reduce", payload, 1, Group(ranks, 1), device, FITTED)
        if seconds:
            bus = 2.0 * payload * (ranks - 1) / ranks / seconds
            yield row, bus / (float(row["busbw_GBps"]) * 1e9) - 1.0
