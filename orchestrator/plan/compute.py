"""Seconds that one GPU computes for one micro-batch: blocks and head, forward, backward and recomputation.

A roofline with sums instead of maxima: matrix products at a share of the peak, plus the memory traffic that is not
hidden behind them, plus elementwise kernels at memory rate, plus a fixed time a block. Communication is `traffic.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from orchestrator.plan.architecture import Weight
from orchestrator.plan.constants import REFERENCE_PEAK, Fitted
from orchestrator.plan.device import Device
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.work import Work

_LARGEST_SHARE = 0.95
"""No matrix product runs faster than this share of a GPU's dense peak."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time of one micro-batch on one GPU."""

    forward: float
    backward: float
    recomputed: float
    """Forward work done again in the backward pass."""

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.recomputed


def product_rate(device: Device, fitted: Fitted, peak: float) -> float:
    """FLOP/s of large matrix products with the device's libraries."""
    share: float = min(_LARGEST_SHARE, fitted.product_share * (REFERENCE_PEAK / peak) ** fitted.product_fall)
    return peak * share * (1.0 - fitted.young_loss * exp(-device.age_months / fitted.young_months))


def _product(weight: Weight, tokens: int, tensor: int, rate: float, memory: float, fitted: Fitted) -> float:
    """Seconds of tokens x weight, forward."""
    outputs, inputs = weight.shape
    if weight.tensor_dim == 0:
        outputs = -(-outputs // tensor)
    elif weight.tensor_dim == 1:
        inputs = -(-inputs // tensor)
    odd = fitted.odd_width_factor if outputs % 64 or inputs % 64 else 1.0
    touched = 2.0 * (tokens * inputs + inputs * outputs + tokens * outputs)
    return 2.0 * tokens * inputs * outputs / rate * odd + touched / memory * fitted.product_passes


def _attention(work: Work, profile: SystemProfile, device: Device, fitted: Fitted) -> tuple[float, float]:
    """Seconds of the attention core of one block, forward and backward."""
    assert device.attention_flops is not None and device.memory_rate is not None
    model, tensor = work.architecture, work.parallel.tensor
    heads = -(-model.heads // tensor)
    pairs = float(work.tokens) * work.seen
    rate = product_rate(device, fitted, device.attention_flops)
    odd = fitted.odd_head_factor if model.head_dim % 8 else 1.0
    flops = 4.0 * pairs * heads * model.head_dim * odd
    if profile.attention == "unfused":
        scores = pairs * heads * fitted.score_bytes / device.memory_rate
        return flops / rate + scores, 2.0 * (flops / rate + scores)
    share = fitted.flash_fused_share if profile.fused_attention else fitted.flash_share
    # Half of the pairs lie behind the causal mask; the backward pass has five products where forward has two.
    forward = 0.5 * flops / (rate * share)
    return forward, 2.5 * forward


def _elementwise(work: Work, profile: SystemProfile, memory: float, fitted: Fitted) -> float:
    """Seconds of norms, residuals, rotary positions and activation function of one block, forward."""
    model, tensor = work.architecture, work.parallel.tensor
    stream = 20.0 * model.hidden / (tensor if work.sequence_parallel else 1)
    inner = (6.0 if model.gated else 4.0) * model.ffn / tensor
    rotary = 4.0 * (model.heads + model.key_value_heads) * model.head_dim / tensor if model.gated else 0.0
    passes = fitted.fused_passes if profile.fused_kernels else fitted.eager_passes
    return work.tokens * (stream + inner + rotary) * passes / memory


def block_seconds(work: Work, profile: SystemProfile, device: Device, fitted: Fitted) -> Seconds:
    """One transformer block and micro-batch."""
    assert device.peak_flops is not None and device.memory_rate is not None
    tensor, memory = work.parallel.tensor, device.memory_rate
    rate = product_rate(device, fitted, device.peak_flops)
    each = [
        _product(weight, work.tokens, tensor, rate, memory, fitted)
        for weight in work.architecture.block
        if weight.matmul
    ]
    products = sum(each)
    attention, attention_backward = _attention(work, profile, device, fitted)
    elementwise = _elementwise(work, profile, memory, fitted)
    forward = products + attention + elementwise
    recomputed = {
        "none": 0.0,
        "attention": attention if profile.attention == "unfused" else 0.0,
        "cheap": elementwise,
        "operators": sum(each[1::2]) + elementwise,
        "layers": 0.5 * forward,
        "full": forward,
    }[work.recompute]
    overhead = fitted.block_overhead_seconds
    return Seconds(
        forward=forward + overhead / 3,
        backward=2.0 * (products + elementwise) + attention_backward + 2 * overhead / 3,
        recomputed=recomputed,
    )


def head_seconds(work: Work, device: Device, fitted: Fitted) -> Seconds:
    """Output matrix and loss of one micro-batch."""
    assert device.peak_flops is not None and device.memory_rate is not None
    tensor, memory = work.parallel.tensor, device.memory_rate
    rate = product_rate(device, fitted, device.peak_flops)
    matrix = Weight((work.architecture.vocab, work.architecture.hidden), 0, matmul=True)
    product = _product(matrix, work.tokens, tensor, rate, memory, fitted)
    loss = work.tokens * -(-work.architecture.vocab // tensor) * fitted.loss_bytes / memory
    return Seconds(forward=product + loss / 2, backward=2.0 * product + loss / 2, recomputed=0.0)


def memory_bound_seconds(moved_bytes: float, rate: float) -> float:
    """Seconds of kernels that only move bytes."""
    return moved_bytes / rate
