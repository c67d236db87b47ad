"""Rows of published tables as planner inputs: which architecture, split, profile and device a row describes.

A row that cannot be expressed raises `Inexpressible` with the reason. What a table leaves open is decided by a rule
that holds for every row (stated where it is applied), never by looking at the row's result.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.plan.architecture import Architecture, Weight
from orchestrator.plan.device import Device
from orchestrator.plan.memory import memories_of
from orchestrator.plan.profiles import SystemProfile, profile_named
from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.stages import as_ranges
from orchestrator.plan.work import Recompute, Work

Row = Mapping[str, str]


class Inexpressible(Exception):  # noqa: N818
    """The planner has no way to state this row; the message says why."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """What a table's GPU name stands for."""

    name: str
    peak: float
    """Dense 16-bit peak, FLOP/s."""
    memory_rate: float
    nvlink: float
    host_rate: float
    memory_gib: float
    released: tuple[int, int]
    """Year and month in which it came out."""
    default_network_gbps: float


GPUS = {
    "V100": GpuSpec("V100", 125e12, 900e9, 150e9, 16e9, 31.7, (2017, 12), 100),
    "A100-40": GpuSpec("A100-40", 312e12, 1555e9, 300e9, 31e9, 39.4, (2020, 6), 200),
    "A100-80": GpuSpec("A100-80", 312e12, 2039e9, 300e9, 31e9, 79.2, (2020, 6), 200),
    "H100-80": GpuSpec("H100-80", 989.4e12, 3350e9, 450e9, 63e9, 79.1, (2022, 10), 400),
    # A part held to 500 of 700 W sustains matrix products in that proportion.
    "H100-96": GpuSpec("H100-96", 989.4e12 * 500 / 700, 2400e9, 450e9, 63e9, 95.0, (2022, 10), 400),
    "H200-14": GpuSpec("H200-141", 989.4e12, 4800e9, 450e9, 63e9, 139.8, (2022, 10), 400),
    "B200-18": GpuSpec("B200-180", 2250e12, 8000e9, 900e9, 63e9, 178.4, (2025, 1), 400),
    "GB200-1": GpuSpec("GB200", 2450e12, 8000e9, 900e9, 63e9, 184.0, (2025, 1), 400),
}


def read_rows(directory: Path, pattern: str) -> Iterator[dict[str, str]]:
    """Every row of the tables whose name matches, in file order."""
    for path in sorted(directory.glob(pattern)):
        with path.open(newline="") as table:
            yield from csv.DictReader(table)


def number(row: Row, key: str, default: int | None = None) -> int:
    """A whole number of the row, or the default where the cell is blank."""
    text = row.get(key, "")
    if text:
        return int(float(text))
    if default is None:
        raise Inexpressible(f"{key} is not stated")
    return default


def gpu_of(row: Row) -> GpuSpec:
    """The GPU that the row names."""
    for prefix, spec in GPUS.items():
        if row["gpu"].startswith(prefix):
            return spec
    raise Inexpressible(f"GPU {row['gpu']} is not known")


_SAME_MODEL = 0.02
"""Relative difference of parameter counts up to which a row's sizes are its model's (padding, positions)."""


def architecture_of_row(row: Row) -> Architecture:
    """The row's transformer. GPT-like unless gated: biases, LayerNorm, learned positions (their sizes are
    negligible)."""
    hidden, ffn, layers = number(row, "hidden"), number(row, "ffn"), number(row, "layers")
    heads = number(row, "heads")
    shared = number(row, "kv_heads", heads)
    if min(hidden, ffn, layers, heads, shared) < 1 or hidden % heads or heads % shared:
        raise Inexpressible(f"{heads} heads over {shared} of keys and values do not divide hidden {hidden}")
    gated, tied = row["gated_mlp"] == "1", row["tied_emb"] != "0"
    vocab = number(row, "vocab")
    if row["kind"].startswith(("megatron", "bloom", "jz", "dgxc", "nemo")):
        # Megatron pads the vocabulary to a multiple of 128 x tensor ranks (its default).
        unit = 128 * number(row, "tp", 1)
        vocab = -(-vocab // unit) * unit
    head_dim = hidden // heads
    found = build_architecture(layers, hidden, heads, shared, head_dim, ffn, vocab, gated, tied, number(row, "seq_len"))
    stated = float(row["params"] or found.parameters)
    if abs(found.parameters / stated - 1.0) > _SAME_MODEL:
        raise Inexpressible(f"the sizes give {found.parameters:.4g} parameters and {stated:.4g} are stated")
    return found


def build_architecture(
    layers: int,
    hidden: int,
    heads: int,
    shared: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    gated: bool,
    tied: bool,
    positions: int,
) -> Architecture:
    """An architecture from bare sizes; what is not gated has biases and, in the embedding, learned positions."""
    query, key_value = heads * head_dim, shared * head_dim
    matrices = [((query, hidden), 0), ((key_value, hidden), 0), ((key_value, hidden), 0), ((hidden, query), 1)]
    matrices += [((ffn, hidden), 0)] * (2 if gated else 1) + [((hidden, ffn), 1)]
    block = [Weight(shape, dim, True) for shape, dim in matrices]
    norms = [Weight((hidden,))] * (1 if gated else 2)
    block += norms * 2
    if not gated:
        block += [Weight((shape[0],), 0 if dim == 0 else None) for shape, dim in matrices]
    table = Weight((vocab, hidden), 0)
    places = [] if gated else [Weight((positions, hidden))]
    return Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=shared,
        head_dim=head_dim,
        ffn=ffn,
        gated=gated,
        vocab=vocab,
        tied=tied,
        embedding=(table, *places),
        block=tuple(block),
        head=(*norms, Weight((vocab, hidden), 0, True)),
    )


def virtual_stages_of_row(row: Row, pipeline: int) -> int:
    """Virtual stages as stated. Where blank: two for torchtitan (its interleaved schedules' default), and for
    Megatron-like systems as many as give whole stages of at least two layers (interleaving is their default)."""
    if pipeline == 1:
        return 1
    if row["vpp"]:
        return number(row, "vpp")
    if row["framework"].startswith("torchtitan"):
        return 2
    layers = number(row, "layers")
    # Embedding and head take the place of a layer each where that makes the stages even.
    slots = layers + 2 if layers % pipeline and (layers + 2) % pipeline == 0 else layers
    if slots % pipeline:
        return 1
    per_rank = slots // pipeline
    choices = [count for count in range(1, per_rank + 1) if per_rank % count == 0 and per_rank // count >= 2]
    return max(choices, default=per_rank)


def facts_of_row(row: Row) -> ParallelFacts:
    """The row's degrees and micro-batches."""
    tensor, pipeline, context = number(row, "tp", 1), number(row, "pp", 1), number(row, "cp", 1)
    world = number(row, "n_gpus")
    data = number(row, "dp", world // (tensor * pipeline * context))
    if tensor * pipeline * context * data != world:
        raise Inexpressible(f"tp {tensor} x pp {pipeline} x cp {context} x dp {data} is not {world} GPUs")
    virtual = virtual_stages_of_row(row, pipeline)
    layers, stages = number(row, "layers"), pipeline * virtual
    stage = zero_stage_of_row(row)
    # Hybrid sharding shares within a node (its usual form; no table says otherwise).
    group = 1 if stage == 0 else data * context
    if row.get("dp_kind", "").startswith("HSDP") and group % number(row, "gpus_per_node", 8) == 0:
        group = number(row, "gpus_per_node", 8)
    return ParallelFacts(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        zero_stage=stage,
        zero_group=group,
        replicate=1 if stage == 0 else data * context // group,
        world_size=world,
        schedule="1f1b" if virtual == 1 else "interleaved_1f1b",
        virtual_stages=virtual,
        micro_batches=micro_batches_of_row(row, data),
        stage_layers=as_ranges(stage_counts(layers, stages)),
    )


def stage_counts(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage, as even as possible; where layers + 2 divide evenly and layers do not, embedding and head
    count as a layer each (Megatron-Core's `account_for_embedding_in_pipeline_split` and its counterpart)."""
    if layers % stages and stages > 1 and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return (each - 1, *([each] * (stages - 2)), each - 1)
    if stages > layers:
        raise Inexpressible(f"{layers} layers in {stages} stages")
    return tuple(layers // stages + (1 if stage < layers % stages else 0) for stage in range(stages))


def zero_stage_of_row(row: Row) -> int:
    """The ZeRO stage; where blank, 0 for plain data parallelism."""
    return number(row, "zero_stage", 0)


def micro_batch_of_row(row: Row) -> int:
    """Samples of one micro-batch; where blank, 1 (all such rows train models that need tensor parallelism). A local
    batch that torchtitan's pipeline cuts is cut into one micro-batch a stage (its default)."""
    pipeline = number(row, "pp", 1)
    if row["framework"].startswith("torchtitan") and pipeline > 1:
        stages = pipeline * virtual_stages_of_row(row, pipeline)
        return max(1, number(row, "micro_batch") // stages)
    return number(row, "micro_batch", 1)


def micro_batches_of_row(row: Row, data: int) -> int:
    """Micro-batches of a step and data rank."""
    per_rank = number(row, "global_batch") / data
    return max(1, round(per_rank / micro_batch_of_row(row)))


def months_between(start: tuple[int, int], text: str) -> float:
    """Months from a release to a date `YYYY` (its middle) or `YYYY-MM`."""
    year, _, month = text.partition("-")
    return (int(year) - start[0]) * 12.0 + (int(month) if month else 6) - start[1]


def device_of_row(row: Row) -> Device:
    """The row's GPU and links; where the network is not stated, the usual one of that GPU's platform."""
    spec = gpu_of(row)
    network = float(row["nic_gbps_per_gpu"] or spec.default_network_gbps)
    low = row["precision"].startswith("fp8")
    return Device(
        peak_flops=spec.peak * (2 if low else 1),
        attention_flops=spec.peak,
        memory_rate=spec.memory_rate,
        node_rate=spec.nvlink,
        network_rate=network * 1e9 / 8,
        host_rate=spec.host_rate,
        gpus_per_node=number(row, "gpus_per_node", 8),
        age_months=max(0.0, months_between(spec.released, row["date"])),
    )


_PRECISIONS = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "bf16_mixed"}

_RECOMPUTE: dict[str, Recompute] = {
    "none": "none",
    "selective": "attention",
    "selective-op": "operators",
    "selective-layer": "layers",
    "full": "full",
}
_LEAST_FIRST: tuple[Recompute, ...] = ("none", "cheap", "full")

_PROFILES = (
    ("llm-foundry", "fsdp1"),
    ("fms-fsdp", "fms_fsdp"),
    ("KempnerForge", "kempner_forge"),
    ("torchtitan FSDP2 +compile +asyncTP", "fsdp2_async"),
    ("torchtitan FSDP2 +compile", "fsdp2_compiled"),
    ("torchtitan", "fsdp2"),
    ("NeMo", "megatron_core"),
    ("Megatron-Core", "megatron_core"),
    ("Meta internal", "llama3"),
    ("Paxml", "xla_fsdp"),
    ("MaxText", "xla_fsdp"),
    ("DeepSpeed ZeRO-3", "deepspeed_zero3"),
    ("HF Trainer + DeepSpeed ZeRO-3", "deepspeed_zero3"),
    ("Megatron+DeepSpeed ZeRO-3", "deepspeed_zero3"),
    ("Megatron+DeepSpeed", "megatron_deepspeed"),
    ("Megatron-DeepSpeed", "megatron_deepspeed"),
    ("Megatron-LM", "megatron"),
)
"""Beginning of a table's `framework` -> the profile that describes it; the first that matches counts."""


def profile_of_row(row: Row) -> SystemProfile:
    """The profile of the row's framework."""
    for beginning, name in _PROFILES:
        if row["framework"].startswith(beginning):
            return profile_named(name)
    raise Inexpressible(f"no profile describes the framework {row['framework']!r}")


def work_of_row(row: Row) -> Work:
    """What one GPU of the row's plan does in a step.

    Where the table does not say what is recomputed, it is the least with which the planner's memory fits the GPU.
    """
    if row["recompute"]:
        if row["recompute"] not in _RECOMPUTE:
            raise Inexpressible(f"recompute {row['recompute']!r} has no meaning here")
        return _work(row, _RECOMPUTE[row["recompute"]])
    profile, capacity = profile_of_row(row), gpu_of(row).memory_gib * 2**30
    for recompute in _LEAST_FIRST:
        work = _work(row, recompute)
        if max(memory.total_bytes or 0 for memory in memories_of(work, profile)) <= capacity:
            return work
    return _work(row, "full")


def _work(row: Row, recompute: Recompute) -> Work:
    return Work(
        architecture=architecture_of_row(row),
        parallel=facts_of_row(row),
        sequence_length=number(row, "seq_len"),
        micro_batch_size=micro_batch_of_row(row),
        precision=_PRECISIONS[row["precision"].split("-")[0]],
        recompute=recompute,
        sequence_parallel=row["seq_parallel"] == "1" and number(row, "tp", 1) > 1,
    )


def configuration(row: Row) -> str:
    """What is left out together in cross-validation: a model on a GPU within a kind of table."""
    return f"{row['kind']}/{row['model']}/{row['gpu']}"
