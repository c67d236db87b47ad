"""Every number of the time and memory models that was fitted to measurements, and the few that are cited.

`Fitted` holds at most 24 numbers; none depends on a model, a source or a row of a table. They were fitted to published
step times by `tests/benchmarks/planner_fit.py`, which also judges them on configurations they were not fitted on. What
a number multiplies is said where it is used; here is what it means.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fitted:
    """Numbers fitted to published measurements; shares are 0 to 1."""

    product_share: float = 0.92
    """Share of a 312 TFLOP/s peak that large matrix products reach with mature libraries."""
    product_fall: float = 0.0826
    """How that share falls with the peak: (312e12 / peak) ** this."""
    young_loss: float = 0.308
    """Share of the rate that libraries lose on a GPU that has just come out."""
    young_months: float = 53.0
    """Months after which that loss has fallen to 1/e."""
    product_passes: float = 0.739
    """Passes over inputs, weights and outputs of a matrix product that are not hidden behind it."""
    eager_passes: float = 1.72
    """Memory traffic of elementwise kernels relative to the fused count, one kernel an operation."""
    fused_passes: float = 0.7
    """The same with fused kernels."""
    flash_share: float = 0.38
    """Rate of flash attention relative to that of large matrix products."""
    flash_fused_share: float = 0.674
    """The same for kernels written for the GPU's generation (cuDNN, Transformer Engine)."""
    score_bytes: float = 8.78
    """Memory traffic of one attention score when scores are stored, forward, in bytes."""
    odd_head_factor: float = 6.9
    """Slow-down of attention's products when head_dim is no multiple of 8."""
    odd_width_factor: float = 1.56
    """Slow-down of matrix products when a cut dimension is no multiple of 64."""
    block_overhead_seconds: float = 0.000247
    """Fixed time of one block and micro-batch, forward and backward (launches, allreduce latencies, small kernels)."""
    nvlink_share: float = 0.801
    """Share of the NVLink rate that large collectives reach."""
    network_share: float = 0.608
    """Share of the network rate that large collectives reach."""
    tensor_hidden: float = 0.801
    """Share of tensor-parallel traffic hidden by systems that overlap it."""
    data_exposed: float = 0.247
    """Share of overlapped data-parallel traffic that is exposed although compute would cover it."""
    context_exposed: float = 0.282
    """Share of context-parallel traffic that is exposed."""
    pipeline_exposed: float = 0.98
    """Share of stage-to-stage traffic that is exposed."""
    jitter: float = 0.00265
    """Step time added with each doubling of the number of nodes (stragglers, congestion)."""
    loss_bytes: float = 20.6
    """Memory traffic of one logit in loss and its gradient, in bytes."""
    step_overhead_seconds: float = 0.0776
    """Fixed time of an optimizer step."""


FITTED = Fitted()

BUCKET_BYTES = 128 * 2**20
"""FP32 gradient bytes of one all-reduce of replicated weights on a GPU, as `engine/data_parallel.py` sets it."""

RESERVE_SHARES = {"fsdp": 0.17, "megatron_deepspeed": 0.16}
"""Share of all other memory that allocator and libraries take on top, by kind of system: fitted to the rows of
published tables whose memory is printed (peak reserved, and nvidia-smi) and to which of them ran."""

COLLECTIVE_LATENCY_SECONDS = 20e-6
"""Time of a small collective inside a node (H200 and B200, 8 ranks: 39 to 50 us for all-reduce up to 0.5 MB;
stas00/ml-engineering, network/README.md): 20 us each way."""
NETWORK_LATENCY_SECONDS = 25e-6
"""Latency that each doubling of the number of nodes adds to a collective (4 nodes, B200, EFA: 0.38 ms for small
ones)."""
REFERENCE_PEAK = 312e12
"""Peak that `product_share` is stated for (A100, BF16)."""

HOST_LINK_SHARE = 0.8
"""Share of the PCIe rate that pinned copies reach (25 of 31 GB/s on PCIe 4.0 x16: bandwidthTest, CUDA samples)."""
HOST_MEMORY_RATE = 110e9
"""Bytes per second at which one node's CPUs update Adam states: 10e9 parameters in 2.5 s at 28 bytes each (DeepSpeed
CPU-Adam, ZeRO-Offload tutorial; recalled)."""
