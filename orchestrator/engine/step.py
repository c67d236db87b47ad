"""One optimizer step: batches in, numbers out. No file, no clock, no policy about when to save or log.

The loss of a step is the sum over valid tokens divided by the valid tokens of the whole global batch, so micro-batch
size, accumulation and the number of ranks change nothing that is learned. Next: `data_parallel.py` (when gradients are
summed), `gradients.py` (norm and clipping).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.engine import gradients
from orchestrator.engine.attention_kernel import AttentionWatch
from orchestrator.engine.data_parallel import DataParallel
from orchestrator.engine.head import LossHead
from orchestrator.engine.loss_scale import LossScale
from orchestrator.engine.mesh import Mesh
from orchestrator.engine.pace import OwnWork
from orchestrator.engine.padding import Padding
from orchestrator.engine.pipeline import Pipeline
from orchestrator.engine.tied import TiedCopies


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step computes with; built once by `build.py`."""

    stages: tuple[nn.Module, ...]
    """This rank's part of the model, wrapped: one module for each virtual pipeline stage that it holds."""
    data_parallel: tuple[DataParallel, ...]
    """Of each stage."""
    pipeline: Pipeline | None
    """None: this rank holds the whole depth of the model."""
    head: LossHead | None
    """Of the last stage; None: another pipeline rank holds it."""
    tied: TiedCopies | None
    """Copies of a weight on the first and the last stage; None: there are none."""
    parameters: dict[str, nn.Parameter]
    """Logical name to parameter, this rank's part of the model."""
    padding: Padding
    """Rows of these that are no tokens."""
    counted: frozenset[str]
    """Names of the parameters whose local part this rank counts in sums over the whole model."""
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    device: torch.device
    attention: AttentionWatch
    """Which kernel this rank's attention ran in."""
    gradient_clip: float | None
    """Largest norm of the whole gradient; None: not clipped."""
    loss_scale: LossScale | None = None
    """Only with `fp16_mixed`."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads, on the device."""

    inputs: Tensor
    """Token ids [micro_batch, sequence]."""
    labels: Tensor
    """Next-token ids [micro_batch, sequence]; `loss.IGNORED` where nothing is learned."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to; the same numbers on every rank."""

    loss: float
    """Mean loss over all valid tokens of the global batch, in nats."""
    gradient_norm: float
    """Euclidean norm of the whole model's gradient before clipping."""
    applied: bool
    """Whether the weights were updated: not when the loss or the gradient is not finite, or the loss above its
    limit."""
    overflowed: bool = False
    """Whether that was only the loss scale of FP16, which has been halved since."""


def train_step(
    parts: Parts,
    batches: Sequence[MicroBatch],
    tokens: int,
    *,
    loss_limit: float = math.inf,
    own: OwnWork | None = None,
) -> StepResult:
    """Forward, backward and update over this rank's micro-batches (collective).

    `tokens` are the valid tokens of the whole global batch, all ranks and micro-batches; none at all gives loss 0 and a
    zero gradient. A loss or gradient that is not finite, or a loss above `loss_limit`, leaves weights and optimizer
    untouched, on all ranks alike. `own` counts the parts without collectives.
    """
    # One multiplication in FP32; the divisor is exact there up to 2**24 tokens and right to the last digit beyond.
    loss_scale = 1.0 if parts.loss_scale is None else parts.loss_scale.value
    share = loss_scale / max(tokens, 1)
    if parts.pipeline is None:
        total = _accumulate(parts, batches, share, own)
    else:
        total = parts.pipeline.forward_backward(batches, share)
    if parts.tied is not None:
        parts.tied.sum_gradients()
    counted = [parameter for name, parameter in parts.parameters.items() if name in parts.counted]
    squared = gradients.squared_norm(gradients.local_gradients(counted))
    loss, norm = (value / loss_scale for value in _whole(parts.mesh, total, squared))
    finite = math.isfinite(loss) and math.isfinite(norm)
    applied = finite and loss <= loss_limit
    if applied:
        clip = 1.0 if parts.gradient_clip is None else gradients.clip_factor(norm, parts.gradient_clip)
        gradients.scale(gradients.local_gradients(parts.parameters.values()), clip / loss_scale)
        with nullcontext() if own is None else own.counted(when=own.update_is_own):
            parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    overflowed = False
    if parts.loss_scale is not None:
        overflowed = math.isfinite(loss) and not finite and parts.loss_scale.helps
        parts.loss_scale.after(overflowed=not finite)
    return StepResult(loss=loss, gradient_norm=norm, applied=applied, overflowed=overflowed)


def _accumulate(parts: Parts, batches: Sequence[MicroBatch], share: float, own: OwnWork | None) -> Tensor:
    """Forward and backward over the micro-batches; the sum of their losses, each multiplied with `share`."""
    (model,), (data_parallel,) = parts.stages, parts.data_parallel
    assert parts.head is not None
    total = torch.zeros((), dtype=torch.float64, device=parts.device)
    for index, batch in enumerate(batches):
        data_parallel.begin_micro_batch(last=index == len(batches) - 1)
        forward = nullcontext() if own is None else own.counted(when=own.forward_is_own)
        with parts.head.learning(batch.labels, share), forward:
            loss: Tensor = model(batch.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _whole(mesh: Mesh, loss: Tensor, squared: Tensor) -> tuple[float, float]:
    """Loss and gradient norm of the whole model and batch: one all-reduce, and the one wait for the device of a step.

    Each sample's loss and each logical parameter is counted once: only one rank of those that hold the same
    contributes.
    """
    values = torch.stack((loss, squared.to(loss.device)))
    if not mesh.speaks_for_samples:
        values[0] = 0.0
    if mesh.whole.size() > 1:
        dist.all_reduce(values)
    loss_value, squared_value = read(values)
    return loss_value, math.sqrt(squared_value) if squared_value >= 0 else math.nan


def read(values: Tensor) -> list[float]:
    """Numbers of the device, once it has computed them."""
    numbers: list[float] = values.tolist()
    return numbers
