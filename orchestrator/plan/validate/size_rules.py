"""Numbers beyond any real training: refused before anything is derived from them.

The limits lie at least ten times above the largest published runs, so that they stop a slip of the keyboard and not a
plan; they also keep every later computation exact, fast and within floating point.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem

LARGEST_WORLD = 1_048_576
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
    "parallel.pipeline": LARGEST_WORLD,
    "parallel.context": LARGEST_WORLD,
    "parallel.zero_group": LARGEST_WORLD,
    "parallel.virtual_stages": 10_000,
    "cluster.gpu.memory_gib": 1_000_000,
}


def _values(config: RunConfig) -> Iterator[tuple[str, object, int]]:
    for key, limit in _LIMITS.items():
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        yield key, value, limit
    for index, group in enumerate(config.cluster.node_groups):
        yield f"cluster.node_groups[{index}].nodes", group.nodes, LARGEST_WORLD
        yield f"cluster.node_groups[{index}].gpus_per_node", group.gpus_per_node, 1024


def absurd_sizes(config: RunConfig) -> Iterator[Problem]:
    """Each number above its limit; judged alone, before `derive` multiplies any of them."""
    for key, value, limit in _values(config):
        if isinstance(value, int | float) and value > limit:
            yield Problem(
                key,
                f"{value} is beyond any real training; at most {limit:,} is planned for.",
                "Check the number for a slip.",
            )
