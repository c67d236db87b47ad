"""Whether a plan fits: its bytes against what the GPU and the host hold, with the arithmetic in the message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.config.schema import ClusterConfig, RunConfig
from orchestrator.errors import Problem
from orchestrator.plan.run_plan import MemoryPlan, RankMemory
from orchestrator.plan.validate.wording import gib

_GIB = 2**30
_CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
_KEPT = ("parameters", "gradients", "optimizer")


def categories(memory: RankMemory) -> dict[str, int]:
    """The categories of the total, largest first; those kept between steps where the total is not known."""
    names = _CATEGORIES if memory.total_bytes is not None else _KEPT
    sizes = {name: getattr(memory, f"{name}_bytes") for name in names}
    return dict(sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1]))


def need(memory: RankMemory) -> int:
    """Bytes of a pipeline rank; of its model states alone where the total is not known: what does not hold those
    certainly does not fit."""
    return memory.total_bytes or memory.persistent_bytes


def over_capacity(memory: MemoryPlan) -> tuple[RankMemory, int] | None:
    """The fullest pipeline rank and its bytes, when it does not fit; None when every rank does."""
    fullest = max(memory.pipeline_ranks, key=lambda rank: (need(rank), -rank.pipeline))
    return (fullest, need(fullest)) if need(fullest) > memory.capacity_bytes else None


def gpu_shortage(memories: Sequence[RankMemory], capacity_bytes: int) -> tuple[float, str] | None:
    """(need / capacity, the sentence) of the fullest pipeline rank when it does not fit."""
    most, negative = max((need(memory), -memory.pipeline) for memory in memories)
    if most <= capacity_bytes:
        return None
    return (
        most / capacity_bytes,
        f"pipeline rank {-negative} needs {gib(most)}, the card holds {gib(capacity_bytes)}",
    )


def host_shortage(memories: Sequence[RankMemory], cluster: ClusterConfig) -> tuple[float, str] | None:
    """(need / memory, the sentence) of a node's host when it does not hold what is offloaded to it."""
    host, limit = max(memory.host_bytes or 0 for memory in memories) * cluster.gpus_per_node, cluster.host_memory_gib
    if limit is None or host <= limit * _GIB:
        return None
    return host / (limit * _GIB), f"a node's host needs {gib(host)}, it has {gib(limit * _GIB)}"


def fit_problems(config: RunConfig, memory: MemoryPlan, remedy: Callable[[], str]) -> tuple[Problem, ...]:
    """At most one problem for the GPU's memory and one for the host's.

    `config` has a uniform cluster; `remedy` is asked for only when the GPU's memory is too small.
    """
    problems = []
    over = over_capacity(memory)
    if over is not None:
        rank, most = over
        parts = ", ".join(f"{name} {gib(size)}" for name, size in categories(rank).items())
        where = f"Pipeline rank {rank.pipeline}" if len(memory.pipeline_ranks) > 1 else "Each rank"
        what = "needs" if rank.total_bytes is not None else "needs, for model states alone,"
        problems.append(
            Problem(
                "cluster.gpu.memory_gib",
                f"{where} {what} {gib(most)} ({parts}); {config.cluster.gpu.name} holds {gib(memory.capacity_bytes)}.",
                remedy(),
            )
        )
    host = max((rank.host_bytes or 0) for rank in memory.pipeline_ranks) * config.cluster.gpus_per_node
    limit = config.cluster.host_memory_gib
    if limit is not None and host > limit * _GIB:
        problems.append(
            Problem(
                "cluster.host_memory_gib",
                f"parallel.offload={config.parallel.offload} keeps {gib(host)} in the memory of a node "
                f"({config.cluster.gpus_per_node} GPUs), and the node has {gib(limit * _GIB)}.",
                "Use parallel.offload=none, more nodes, or a higher parallel.zero_stage over more ranks.",
            )
        )
    return tuple(problems)
