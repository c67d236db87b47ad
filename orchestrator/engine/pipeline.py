"""Pipeline parallelism: torch's schedules over this rank's stages, and who tells data parallelism when to do what.

Each stage is a module of its own with the layers of its part of the cut. With the schedules that run whole backward
passes, stages are hidden from torch's own handling of FSDP, so that each ZeRO stage keeps between micro-batches what
its name says. The schedules that split a backward pass into inputs and weights (zero bubble, DualPipeV) need torch's
handling: weights and gradients then stay whole within a step, as in stage 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from orchestrator.engine.data_parallel import DataParallel
from orchestrator.engine.head import LossHead
from orchestrator.engine.mesh import Mesh
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.schedules import SPLIT_BACKWARDS

if TYPE_CHECKING:
    from orchestrator.engine.step import MicroBatch

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""One stage a rank."""
LOOPED = {"interleaved_1f1b": ScheduleInterleaved1F1B}
SPLIT = {
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Several stages a rank; backward passes are split into inputs and weights (`SPLIT_BACKWARDS`)."""


class _Hidden(nn.Module):
    """A stage as torch's pipeline sees it: an ordinary module, whose switches nobody else touches."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.stage(inputs)
        return output


class _Learning(PipelineStage):
    """A pipeline stage that, if it is the last, computes the loss: each of its forward passes gets its labels."""

    step: _Step | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """See torch's `PipelineStage`."""
        if self.step is None:
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)
        with self.step.head.learning(self.step.labels[fwd_chunk_id], self.step.share):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)


@dataclass(slots=True)
class _Step:
    """What the last stage learns from in a step."""

    head: LossHead
    labels: list[Tensor]
    """Of each micro-batch."""
    share: float
    """What each summed loss is multiplied with."""


class _Stage(_Learning):
    """A pipeline stage that sets the switches of data parallelism before each of its backward passes."""

    def __init__(self, data_parallel: DataParallel, micro_batches: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._data_parallel = data_parallel
        self._micro_batches = micro_batches
        self._done = 0

    def backward_maybe_with_nosync(self, *args: Any, **options: Any) -> Any:
        """See torch's `PipelineStage`; backward passes of a stage run in the order of the micro-batches."""
        self._done += 1
        self._data_parallel.begin_micro_batch(last=self._done == self._micro_batches)
        if self._done == self._micro_batches:
            self._done = 0
        return super().backward_maybe_with_nosync(*args, **options)


@dataclass(slots=True)
class Pipeline:
    """This rank's stages and the schedule that runs them."""

    stages: tuple[nn.Module, ...]
    numbers: tuple[int, ...]
    """Virtual stage of each."""
    holder: tuple[int, ...]
    """Pipeline rank that holds each virtual stage of the whole model."""
    schedule: PipelineScheduleSingle | PipelineScheduleMulti
    group: dist.ProcessGroup
    mesh: Mesh
    hidden: Tensor
    """What travels between stages, on the meta device."""
    device: torch.device
    head: LossHead | None
    """None: the last stage is on another rank."""
    last: _Learning | None = None
    """The last stage, if it is here."""

    def forward_backward(self, batches: Sequence[MicroBatch], share: float) -> Tensor:
        """Run a step's micro-batches forward and backward (collective over the pipeline).

        Gives the sum of the losses, each multiplied with `share`; 0 on ranks that do not hold the last stage.
        """
        inputs = (torch.cat([batch.inputs for batch in batches]),) if 0 in self.numbers else ()
        losses: list[Tensor] = []
        target = None
        if self.head is not None and self.last is not None:
            labels = [batch.labels for batch in batches]
            self.last.step = _Step(self.head, labels, share)
            # The schedule wants one; the stage itself has used the labels by then.
            target = torch.cat(labels)
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.detach()
        return total

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Summed loss of one batch without gradients, stage after stage; 0 where the last stage is not held."""
        value: Tensor = batch.inputs
        mine = self.mesh.pipeline_rank
        for number, holder in enumerate(self.holder):
            before = self.holder[number - 1] if number else holder
            if mine == before and holder != before:
                dist.send(value.contiguous(), group=self.group, group_dst=holder)
            if mine != holder:
                continue
            if holder != before:
                rows = (batch.inputs.shape[0], *self.hidden.shape[1:])
                value = torch.empty(rows, dtype=self.hidden.dtype, device=self.device)
                dist.recv(value, group=self.group, group_src=before)
            last = self.head is not None and number == len(self.holder) - 1
            with self.head.learning(batch.labels) if self.head is not None and last else nullcontext():
                value = self.stages[self.numbers.index(number)](value)
        return value if mine == self.holder[-1] else torch.zeros((), device=self.device)


def _output(loss: Tensor, labels: Tensor) -> Tensor:
    """The last stage's output is the loss already."""
    return loss


def build_pipeline(
    plan: RunPlan,
    mesh: Mesh,
    stages: Sequence[nn.Module],
    data_parallel: Sequence[DataParallel],
    head: LossHead | None,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> Pipeline | None:
    """The pipeline over this rank's stages (`mesh.stages`, in that order); None where there is only one pipeline
    rank."""
    parallel, config = plan.parallel, plan.config
    assert parallel is not None
    if parallel.pipeline == 1:
        return None
    name, count = parallel.schedule, parallel.micro_batches
    length = config.training.sequence_length
    if config.parallel.sequence_parallel:
        length //= mesh.tensor.size()
    rows = config.training.micro_batch_size
    hidden = torch.empty(rows, length, config.model.hidden_size, dtype=compute_dtype, device="meta", requires_grad=True)
    tokens = torch.empty(rows, config.training.sequence_length, dtype=torch.int64, device="meta")
    loss = torch.empty((), device="meta", requires_grad=True)
    total = len(parallel.stage_layers)
    group = mesh.whole["pipeline"].get_group()
    wrapped: list[_Learning] = []
    for stage, number, part in zip(stages, mesh.stages, data_parallel, strict=True):
        options: dict[str, Any] = {
            "input_args": tokens if number == 0 else hidden,
            "output_args": loss if number == total - 1 else hidden,
            "group": group,
        }
        if name in SPLIT_BACKWARDS:
            wrapped.append(_Learning(stage, number, total, device, **options))
        else:
            wrapped.append(_Stage(part, count, _Hidden(stage), number, total, device, **options))
    pipeline = Pipeline(
        stages=tuple(stages),
        numbers=mesh.stages,
        holder=mesh.holder,
        schedule=None,  # type: ignore[arg-type]
        group=group,
        mesh=mesh,
        hidden=hidden,
        device=device,
        head=head,
        last=wrapped[mesh.stages.index(total - 1)] if total - 1 in mesh.stages else None,
    )
    options = {"loss_fn": _output, "scale_grads": False}
    if name in SINGLE:
        pipeline.schedule = SINGLE[name](wrapped[0], count, **options)
    else:
        pipeline.schedule = (LOOPED | SPLIT)[name](list(wrapped), count, **options)
    return pipeline
