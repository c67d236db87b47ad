"""The output head of the last stage: takes labels and gives the loss, takes none and gives logits.

The head's own forward is replaced, not the module, so that parameter names stay what they are and the weight is
gathered once a forward pass by whoever shards it, however many chunks the loss is computed in. Labels are put in place
for one forward pass with `learning`; a model knows nothing of them. The arithmetic is `loss.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from models.parameters import ShardingTable
from orchestrator.engine.loss import HeadPart, head_loss
from orchestrator.engine.mesh import Mesh
from orchestrator.plan.loss_chunks import chunk_tokens, gradient_ahead
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.vocabulary import padded_rows


class LossHead:
    """The forward of one output head."""

    def __init__(self, head: nn.Module, part: HeadPart) -> None:
        if getattr(head, "bias", None) is not None:
            raise ValueError("the loss is computed from the head's weight alone; a head with a bias is not known here")
        self._head = head
        self._part = part
        self._labels: Tensor | None = None
        self._share = 1.0
        head.forward = self._forward

    @contextmanager
    def learning(self, labels: Tensor, share: float = 1.0) -> Iterator[None]:
        """Within, the model's output is `share` times the summed loss on `labels` [batch, sequence]."""
        self._labels, self._share = labels, share
        try:
            yield
        finally:
            self._labels = None

    def _forward(self, hidden: Tensor) -> Tensor:
        """Hidden state [batch, sequence, features], whole on every tensor rank."""
        weight = self._head.weight
        assert isinstance(weight, Tensor)
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        if self._labels is not None:
            return head_loss(hidden, own, self._labels, self._share, self._part)
        logits = functional.linear(hidden, own)
        if self._part.rows < own.shape[0]:
            padding = torch.arange(own.shape[0], device=logits.device) >= self._part.rows
            logits = logits.masked_fill(padding, -torch.inf)
        if not isinstance(weight, DTensor):
            return logits
        return DTensor.from_local(logits, weight.device_mesh, [Shard(-1)], run_check=False)


def loss_head(plan: RunPlan, mesh: Mesh, stages: Sequence[nn.Module], table: ShardingTable) -> LossHead | None:
    """The head of the last stage, whose forward it replaces; None on ranks that do not hold it."""
    assert plan.parallel is not None
    (name,) = [pattern for pattern, style in table.styles if style == "vocabulary_head"]
    last = len(plan.parallel.stage_layers) - 1
    if last not in mesh.stages:
        return None
    head = stages[mesh.stages.index(last)].get_submodule(name)
    vocabulary, tensor = plan.config.model.vocab_size, mesh.tensor.size()
    rows = padded_rows(vocabulary, plan.parallel) // tensor
    first = mesh.tensor_rank * rows
    part = HeadPart(
        first=first,
        rows=max(0, min(rows, vocabulary - first)),
        group=mesh.tensor.get_group() if tensor > 1 else None,
        chunk_tokens=chunk_tokens(plan.config, plan.parallel),
        gradient_ahead=gradient_ahead(plan.parallel.schedule, plan.parallel.pipeline),
    )
    return LossHead(head, part)
