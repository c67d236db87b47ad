"""`Device`: one GPU with its links, as the time model sees it: rates in base units, what is not known is None.

Owns the way from the declared cluster to rates. Refuses nothing: a missing rate makes the times that need it None.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import ClusterConfig


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its links."""

    peak_flops: float | None
    """Dense matrix products in the compute precision, FLOP/s."""
    attention_flops: float | None
    """The same for attention, which stays in 16 bits where linear layers compute in 8."""
    memory_rate: float | None
    """Own memory, bytes/s."""
    node_rate: float | None
    """To other GPUs of the node, one direction, bytes/s (NVLink, or PCIe without it)."""
    network_rate: float | None
    """To other nodes, bytes/s a GPU."""
    host_rate: float | None
    """To the host's memory, one direction, bytes/s."""
    gpus_per_node: int
    age_months: float = 48.0
    """Months since this kind of GPU came out, at the time of the software; libraries mature slowly."""

    @property
    def computes(self) -> bool:
        """Whether every rate is known that computation is timed with."""
        return None not in (self.peak_flops, self.attention_flops, self.memory_rate)


def compute_precision(precision: str) -> str:
    """Type in which matrix products compute: `fp32`, `bf16` or `fp16`."""
    return precision.split("_")[0]


def device_of(cluster: ClusterConfig, precision: str) -> Device:
    """The GPU of a uniform cluster. A cluster of CPUs has no known rates."""
    gpu = cluster.gpu
    peak = getattr(gpu.peak_tflops, compute_precision(precision))
    node = gpu.nvlink_gb_per_s or gpu.pcie_gb_per_s
    network = cluster.network_gbps_per_gpu
    return Device(
        peak_flops=None if peak is None else peak * 1e12,
        attention_flops=None if peak is None else peak * 1e12,
        memory_rate=None if gpu.memory_bandwidth_gb_per_s is None else gpu.memory_bandwidth_gb_per_s * 1e9,
        node_rate=None if not node else node * 1e9,
        network_rate=None if network is None else network * 1e9 / 8,
        host_rate=None if gpu.pcie_gb_per_s is None else gpu.pcie_gb_per_s * 1e9,
        gpus_per_node=cluster.gpus_per_node,
    )
