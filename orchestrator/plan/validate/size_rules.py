"""Numbers beyond any real training: refused before anything is derived from them.

The limits lie above the largest published runs, so that they stop a slip of the keyboard and not a plan; they also keep
every later computation exact, fast and within floating point.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem

MOST_PIPELINE_RANKS = 256
MOST_STAGES = 1024
"""Virtual stages over all pipeline ranks; published pipelines have up to 64 ranks, or some 130 stages."""
LARGEST_WORLD = 262_144
"""Ranks that a plan lists at most; the largest published runs used some 100,000 GPUs."""

_LIMITS: dict[str, int] = {
    "model.hidden_size": 1_000_000,
    "model.intermediate_size": 10_000_000,
    "model.num_hidden_layers": 10_000,
    "model.num_attention_heads": 100_000,
    "model.num_key_value_heads": 100_000,
    "model.head_dim": 1_000_000,
    "model.vocab_size": 100_000_000,
    "model.max_position_embeddings": 1_000_000_000,
    "training.sequence_length": 1_000_000_000,
    "training.global_batch_size": 1_000_000_000,
    "training.micro_batch_size": 1_000_000_000,
    "training.steps": 1_000_000_000_000,
    "training.tokens": 10**18,
    "cluster.nodes": LARGEST_WORLD,
    "cluster.gpus_per_node": 1024,
    "parallel.data": LARGEST_WORLD,
    "parallel.tensor": LARGEST_WORLD,
    "parallel.pipeline": MOST_PIPELINE_RANKS,
    "parallel.context": LARGEST_WORLD,
    "parallel.zero_group": LARGEST_WORLD,
    "parallel.virtual_stages": 64,
}

_GPU_RANGES: dict[str, tuple[float, float]] = {
    "memory_gib": (1e-3, 1e5),
    "memory_bandwidth_gb_per_s": (1e-2, 1e7),
    "peak_tflops.fp32": (1e-4, 1e6),
    "peak_tflops.bf16": (1e-4, 1e6),
    "peak_tflops.fp16": (1e-4, 1e6),
    "nvlink_gb_per_s": (1e-3, 1e6),
    "pcie_gb_per_s": (1e-3, 1e6),
    "price_per_hour": (1e-6, 1e6),
}
_NODE_RANGES: dict[str, tuple[float, float]] = {
    "network_gbps_per_gpu": (1e-3, 1e6),
    "host_memory_gib": (1e-3, 1e7),
}
"""What a figure of the hardware can be, in its own unit: from a small CPU to well above today's largest."""


def _at(section: object, key: str) -> object:
    for part in key.split("."):
        section = getattr(section, part)
    return section


def absurd_sizes(config: RunConfig) -> Iterator[Problem]:
    """Each number beyond its limits; judged alone, before `derive` multiplies any of them."""
    for key, limit in _LIMITS.items():
        yield from _too_large(key, _at(config, key), limit)
    groups = [(f"cluster.node_groups[{index}]", group) for index, group in enumerate(config.cluster.node_groups)]
    for place, group in groups:
        yield from _too_large(f"{place}.nodes", group.nodes, LARGEST_WORLD)
        yield from _too_large(f"{place}.gpus_per_node", group.gpus_per_node, _LIMITS["cluster.gpus_per_node"])
    for place, section in [("cluster", config.cluster), *groups]:
        for key, span in _NODE_RANGES.items():
            yield from _out_of_range(f"{place}.{key}", _at(section, key), span)
        for key, span in _GPU_RANGES.items():
            yield from _out_of_range(f"{place}.gpu.{key}", _at(section, f"gpu.{key}"), span)


def _too_large(key: str, value: object, limit: int) -> Iterator[Problem]:
    if isinstance(value, int) and value > limit:
        message = f"{value} is beyond any real training; at most {limit:,} is planned for."
        yield Problem(key, message, "Check the number for a slip.")


def _out_of_range(key: str, value: object, span: tuple[float, float]) -> Iterator[Problem]:
    # 0 says that there is none of it (NVLink, a price).
    if isinstance(value, int | float) and value != 0 and not span[0] <= value <= span[1]:
        message = f"{value:g} is no figure of real hardware in this unit; {span[0]:g} to {span[1]:g} is planned for."
        yield Problem(key, message, "Check the number and its unit.")
