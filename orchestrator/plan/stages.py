"""The pipeline cut: which layers each virtual stage holds, and which stages each pipeline rank holds.

Owns the balance by cost (embedding and head counted) and the override by list. Layers always add up: every function
here either returns a cut of all layers or None. Which rank holds which stage follows from the schedule's shape.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from orchestrator.config.schema import ModelConfig, RunConfig

V_SHAPED = frozenset({"zbv_zero_bubble", "dualpipev"})
"""Schedules whose rank r holds stages r and 2p-1-r, so that the first and the last stage share a rank."""

_EMBEDDING_BYTES_PER_WEIGHT = 16
"""Memory traffic a micro-batch causes on each weight of the embedding: its dense FP32 gradient is cleared, added into
and read again (4 passes x 4 bytes); the lookup itself is negligible."""
_FLOPS_PER_BYTE = 100
"""Matrix-product FLOP that a GPU does in the time of one byte of memory traffic: A100 312e12 x 0.6 / 2.0e12, H100
989e12 x 0.5 / 3.35e12; rounded. Only the relative weight of the embedding depends on it."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Work of one micro-batch by part, in FLOP or any common unit."""

    embedding: float
    layer: float
    head: float


def stage_costs(model: ModelConfig, sequence_length: int, micro_batch_size: int) -> StageCosts:
    """Forward and backward FLOP of one micro-batch: 6 x weights x tokens for products, 12 h s a token for attention.

    Approximate on purpose (biases and norms left out): it is used to balance a cut, not to predict a time.
    """
    hidden = model.hidden_size
    head_dim = model.head_dim or max(1, hidden // model.num_attention_heads)
    query = model.num_attention_heads * head_dim
    key_value = (model.num_key_value_heads or model.num_attention_heads) * head_dim
    mlp_matrices = 3 if model.family == "llama" else 2
    weights = 2 * hidden * query + 2 * hidden * key_value + mlp_matrices * hidden * model.intermediate_size
    tokens = sequence_length * micro_batch_size
    vocabulary = model.vocab_size * hidden
    return StageCosts(
        embedding=float(vocabulary * _EMBEDDING_BYTES_PER_WEIGHT * _FLOPS_PER_BYTE),
        layer=float((6 * weights + 12 * query * sequence_length) * tokens),
        head=float(6 * vocabulary * tokens),
    )


def stages_of_rank(pipeline_rank: int, pipeline: int, virtual_stages: int, schedule: str) -> tuple[int, ...]:
    """Virtual stages that a pipeline rank holds, ascending: looped (r, r+p, ...) or V-shaped (r, 2p-1-r)."""
    if schedule in V_SHAPED and virtual_stages == 2:
        return (pipeline_rank, 2 * pipeline - 1 - pipeline_rank)
    return tuple(pipeline_rank + turn * pipeline for turn in range(virtual_stages))


def balanced_counts(
    layers: int, pipeline: int, virtual_stages: int, schedule: str, costs: StageCosts
) -> tuple[int, ...] | None:
    """Layers of every virtual stage such that the busiest pipeline rank has as little work as possible.

    Layers are alike, so giving each to the rank with the least work so far, and on it to the lightest stage, is optimal
    for the busiest rank. Among equals the later stage gets it: earlier ones keep more micro-batches in flight.
    None when there are fewer layers than stages: each stage holds at least one.
    """
    stages = pipeline * virtual_stages
    if stages > layers:
        return None
    work = [costs.layer] * stages
    work[0] += costs.embedding
    work[-1] += costs.head
    counts = [1] * stages
    owned = [stages_of_rank(rank, pipeline, virtual_stages, schedule) for rank in range(pipeline)]
    # The heap's entry: the rank's work with one more layer; later ranks first among equals.
    ranks = [(sum(work[stage] for stage in owned[rank]) + costs.layer, -rank) for rank in range(pipeline)]
    heapq.heapify(ranks)
    for _ in range(layers - stages):
        load, negative = heapq.heappop(ranks)
        stage = min(owned[-negative], key=lambda candidate: (work[candidate], -candidate))
        counts[stage] += 1
        work[stage] += costs.layer
        heapq.heappush(ranks, (load + costs.layer, negative))
    return tuple(counts)


def as_ranges(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """[first, last+1] layer of every stage from the number of layers of each."""
    ranges, first = [], 0
    for count in counts:
        ranges.append((first, first + count))
        first += count
    return tuple(ranges)


def cut(config: RunConfig) -> tuple[tuple[int, int], ...] | None:
    """The layers of every virtual stage: `parallel.stage_layers` as given, or balanced; None when no such cut is."""
    parallel, layers = config.parallel, config.model.num_hidden_layers
    stages = parallel.pipeline * parallel.virtual_stages
    if parallel.stage_layers != "auto":
        counts = parallel.stage_layers
        valid = len(counts) == stages and sum(counts) == layers and min(counts) >= 1
        return as_ranges(counts) if valid else None
    costs = stage_costs(config.model, config.training.sequence_length, config.training.micro_batch_size)
    balanced = balanced_counts(layers, parallel.pipeline, parallel.virtual_stages, parallel.schedule, costs)
    return None if balanced is None else as_ranges(balanced)
