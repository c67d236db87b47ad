"""`cluster.*`: the hardware, as declared; `conf/gpu/` holds one entry a kind of GPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.schema.base import Count, Positive, PositiveOrZero, Section


class PeakTflops(Section):
    """Dense matrix-product peak by precision, in TFLOP/s (1e12 floating-point operations a second)."""

    fp32: Positive | None = None
    """FP32, in TFLOP/s; null: not known."""
    bf16: Positive | None = None
    """BF16 with FP32 accumulation, in TFLOP/s; null: not known or not supported."""
    fp16: Positive | None = None
    """FP16 with FP32 accumulation, in TFLOP/s; null: not known or not supported."""


class GpuConfig(Section):
    """One kind of GPU (or, for `device: cpu`, one process's share of the machine)."""

    name: str
    """What the GPU is called, for messages and for matching against what a node reports."""
    memory_gib: Positive
    """Memory that a process can use, in GiB (an 80 GB A100 shows 79.2)."""
    memory_bandwidth_gb_per_s: Positive | None = None
    """Bandwidth to the GPU's own memory, in GB/s (1e9 bytes)."""
    peak_tflops: PeakTflops = PeakTflops()
    """Dense matrix-product peaks."""
    nvlink_gb_per_s: PositiveOrZero = 0
    """Bandwidth to other GPUs of the node, one direction, in GB/s; 0: no NVLink, PCIe is used."""
    pcie_gb_per_s: Positive | None = None
    """Bandwidth to the host's memory, one direction, in GB/s."""
    price_per_hour: PositiveOrZero | None = None
    """What an hour of one GPU costs you, in `price_currency`; null: not known, no cost is given."""
    price_currency: str = "USD"
    """Currency of the price."""
    source: str = ""
    """Where the figures come from."""


class NodeGroup(Section):
    """Nodes that are alike; a cluster of unlike nodes is a list of these."""

    nodes: Count
    """Nodes of this kind."""
    gpus_per_node: Count
    """GPUs in each (processes, for `device: cpu`)."""
    gpu: GpuConfig
    """Their kind of GPU: an entry of `conf/gpu/` by name, or its fields."""
    network_gbps_per_gpu: Positive | None = None
    """Network to other nodes, in Gbit/s a GPU; null: as `cluster.network_gbps_per_gpu`."""
    host_memory_gib: Positive | None = None
    """Memory of one node's host, in GiB; null: as `cluster.host_memory_gib`."""
    cores_per_node: Count | None = None
    """CPU cores of one node; null: as `cluster.cores_per_node`."""


class ClusterConfig(Section):
    """The hardware that the run may use."""

    name: str = ""
    """What the cluster is called, for messages."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What computes: `cuda` GPUs with NCCL, or `cpu` processes with gloo."""
    nodes: Count | Literal["auto"] = 1
    """Machines; `auto`: as few as the plan needs."""
    gpus_per_node: Count = 8
    """GPUs in each machine (processes, for `device: cpu`)."""
    gpu: GpuConfig
    """Kind of GPU: an entry of `conf/gpu/`."""
    network_gbps_per_gpu: Positive | None = None
    """Network between machines, in Gbit/s a GPU; null: not known."""
    host_memory_gib: Positive | None = None
    """Memory of one machine's host, in GiB; null: not known."""
    cores_per_node: Count | None = None
    """CPU cores of one machine; null: not known, taken from the machine at start."""
    require_labels: dict[str, str] = Field(default_factory=dict)
    """Labels that a Ray node must have for ranks to be placed on it, for example `{pool: train}`."""
    domain_label: str = "ray.io/gpu-domain"
    """Ray node label that names a node's rack or NVLink domain; a run lies in as few of them as hold it."""
    node_groups: tuple[NodeGroup, ...] = ()
    """Unlike nodes, one entry a kind; replaces `nodes`, `gpus_per_node` and `gpu` where it is given."""
