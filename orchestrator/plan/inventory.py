"""The declared hardware as whole numbers: which nodes there are, and what the weakest of them offers.

Owns counting GPUs and reducing unlike nodes to what every rank can rely on. Refuses to look at a machine: this is the
declaration only (`launch/inventory.py` asks a live cluster). `layout.py` gives the GPUs to ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.config.schema import ClusterConfig, GpuConfig, PeakTflops


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that are alike."""

    nodes: int | None
    """How many; None: as many as the plan needs (`cluster.nodes=auto`)."""
    gpus_per_node: int
    gpu: GpuConfig
    network_gbps_per_gpu: float | None
    host_memory_gib: float | None
    cores_per_node: int | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """All declared nodes, kind by kind, in the order of the declaration."""

    kinds: tuple[NodeKind, ...]

    @property
    def open_ended(self) -> bool:
        """Whether the number of nodes follows from the plan."""
        return any(kind.nodes is None for kind in self.kinds)

    @property
    def gpus(self) -> int | None:
        """All GPUs; None when the number of nodes follows from the plan."""
        return None if self.open_ended else sum((kind.nodes or 0) * kind.gpus_per_node for kind in self.kinds)

    def usable(self, tensor: int) -> int | None:
        """GPUs that whole tensor-parallel groups of `tensor` can use, no group crossing a node."""
        if self.open_ended:
            return None
        return sum((kind.nodes or 0) * (kind.gpus_per_node // tensor) * tensor for kind in self.kinds)

    @property
    def smallest_node(self) -> int:
        """GPUs of the smallest node."""
        return min(kind.gpus_per_node for kind in self.kinds)

    @property
    def largest_node(self) -> int:
        """GPUs of the largest node."""
        return max(kind.gpus_per_node for kind in self.kinds)

    def describe(self) -> str:
        """The count in words: `8 nodes x 8 = 64 GPUs`."""
        if self.open_ended:
            return f"as many nodes of {self.kinds[0].gpus_per_node} GPUs as needed"
        parts = " + ".join(f"{kind.nodes} {_nodes(kind.nodes or 0)} x {kind.gpus_per_node}" for kind in self.kinds)
        return f"{parts} = {self.gpus} GPUs"


def _nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"


def take_inventory(cluster: ClusterConfig) -> Inventory:
    """Count what `cluster` declares; `node_groups` replaces the plain fields where it is given."""
    if not cluster.node_groups:
        nodes = None if cluster.nodes == "auto" else cluster.nodes
        return Inventory(
            (
                NodeKind(
                    nodes,
                    cluster.gpus_per_node,
                    cluster.gpu,
                    cluster.network_gbps_per_gpu,
                    cluster.host_memory_gib,
                    cluster.cores_per_node,
                ),
            )
        )
    return Inventory(
        tuple(
            NodeKind(
                group.nodes,
                group.gpus_per_node,
                group.gpu,
                group.network_gbps_per_gpu or cluster.network_gbps_per_gpu,
                group.host_memory_gib or cluster.host_memory_gib,
                group.cores_per_node or cluster.cores_per_node,
            )
            for group in cluster.node_groups
        )
    )


def _least(values: Iterable[float | None]) -> float | None:
    """The smallest value; None as soon as one is not known, because an unknown one may be smaller."""
    known = list(values)
    return None if any(value is None for value in known) else min(value for value in known if value is not None)


def weakest_gpu(inventory: Inventory) -> GpuConfig:
    """What every GPU of the inventory offers at least: each figure is the smallest of all kinds.

    A synchronous step waits for its slowest rank and a plan must fit on its smallest, so this is the GPU to plan for.
    The price is the mean over the GPUs, because each is paid for as what it is.
    """
    gpus = [kind.gpu for kind in inventory.kinds]
    if all(gpu == gpus[0] for gpu in gpus):
        return gpus[0]
    counts = [(kind.nodes or 1) * kind.gpus_per_node for kind in inventory.kinds]
    prices = [gpu.price_per_hour for gpu in gpus]
    priced = all(price is not None for price in prices) and len({gpu.price_currency for gpu in gpus}) == 1
    return GpuConfig(
        name=" + ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        memory_gib=min(gpu.memory_gib for gpu in gpus),
        memory_bandwidth_gb_per_s=_least(gpu.memory_bandwidth_gb_per_s for gpu in gpus),
        peak_tflops=PeakTflops(
            fp32=_least(gpu.peak_tflops.fp32 for gpu in gpus),
            bf16=_least(gpu.peak_tflops.bf16 for gpu in gpus),
            fp16=_least(gpu.peak_tflops.fp16 for gpu in gpus),
        ),
        nvlink_gb_per_s=min(gpu.nvlink_gb_per_s for gpu in gpus),
        pcie_gb_per_s=_least(gpu.pcie_gb_per_s for gpu in gpus),
        price_per_hour=sum((price or 0.0) * n for price, n in zip(prices, counts, strict=True)) / sum(counts)
        if priced
        else None,
        price_currency=gpus[0].price_currency,
        source="the smallest figure of each kind",
    )


def uniform_cluster(cluster: ClusterConfig, nodes: int, tensor: int = 1) -> ClusterConfig:
    """`cluster` as like nodes that each offer what the weakest kind offers: what memory and cost compute with.

    Kinds whose nodes are too small for a tensor group of `tensor` take no part.
    """
    declared = take_inventory(cluster).kinds
    kinds = tuple(kind for kind in declared if kind.gpus_per_node >= tensor) or declared
    inventory = Inventory(kinds)
    cores = _least(kind.cores_per_node for kind in kinds)
    return cluster.model_copy(
        update={
            "nodes": nodes,
            "gpus_per_node": inventory.smallest_node,
            "gpu": weakest_gpu(inventory),
            "network_gbps_per_gpu": _least(kind.network_gbps_per_gpu for kind in kinds),
            "host_memory_gib": _least(kind.host_memory_gib for kind in kinds),
            "cores_per_node": None if cores is None else int(cores),
            "node_groups": (),
        }
    )
