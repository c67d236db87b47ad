"""Tensor parallelism: the words of a model's sharding table become torch's own styles, once for all models.

Without sequence parallelism the residual stream is whole on every tensor rank; with it, each rank holds its part of the
sequence between the blocks' matrices. Every parameter becomes a DTensor on the tensor axis, the replicated ones too, so
that norm, clipping and checkpoints count each element once. The logits stay cut along the vocabulary (`loss.py`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.parameters import ShardingTable, Style
from orchestrator.engine.dropout import OwnMasks

SEQUENCE_DIM = 1
"""Of the residual stream [batch, sequence, hidden]."""


def apply_tensor_parallel(
    model: nn.Module, tensor: DeviceMesh, table: ShardingTable, *, sequence_parallel: bool
) -> None:
    """Cut the model over the tensor axis, in place; its parameters may still be on the meta device.

    Raises ValueError for a module with parameters that the table does not name.
    """
    if tensor.size() == 1:
        return
    stream: Placement = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    for name, module in list(model.named_modules()):
        style = _style_of(name, table)
        if style is not None:
            parallelize_module(module, tensor, _torch_style(style, stream))
    model.tie_weights()  # type: ignore[operator]
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise ValueError(f"the model's sharding table says nothing of {', '.join(whole)}")


def _style_of(name: str, table: ShardingTable) -> Style | None:
    for pattern, style in table.styles:
        if pattern.count(".") == name.count(".") and fnmatchcase(name, pattern):
            return style
    return None


def _torch_style(style: Style, stream: Placement) -> ParallelStyle:
    """The torch style of a word; `stream` is how the residual stream lies between blocks. See
    `models/parameters.py`."""
    cut = isinstance(stream, Shard)
    styles: dict[Style, ParallelStyle] = {
        "vocabulary_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "scatter_output": Replicated(stream),
        "norm": SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True) if cut else Replicated(stream),
        # One conversion for all products behind it, so that their input gradients are summed before they are reduced.
        "gather_input": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=stream),
        "vocabulary_head": VocabularyHead(input_layouts=stream),
        "stream_dropout": OwnMasks() if cut else AsItIs(),
        "head_dropout": OwnMasks(),
    }
    return styles[style]


class VocabularyHead(ColwiseParallel):
    """The output head, cut by rows of its weight; `head.py` computes with the plain parts, whole hidden states and all.

    Each rank's gradient of the hidden state is that of its own rows, and is summed on the way back.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        stream = DTensor.from_local(inputs[0], device_mesh, input_layouts, run_check=False)
        whole: Tensor = stream.redistribute(placements=desired_input_layouts).to_local(grad_placements=[Partial()])
        return whole

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Tensor, device_mesh: DeviceMesh
    ) -> Tensor:
        return outputs


class AsItIs(ParallelStyle):
    """A module without parameters that computes the same on all tensor ranks from the same input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class Replicated(ParallelStyle):
    """A module whose parameters are alike on all tensor ranks and that computes the same on each from the same input.

    `output`: how its result lies over the ranks afterwards (replicated, or cut along the sequence).
    """

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        output = partial(_local_output, self.output)
        # torch's annotation says that these two return nothing; it uses what they return, as its own styles do.
        return distribute_module(module, device_mesh, _replicate_parameters, _replicated_input, output)  # type: ignore[arg-type]


def _replicate_parameters(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole))


def _replicated_input(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    first = inputs[0]
    return (DTensor.from_local(first, mesh, [Replicate()], run_check=False), *inputs[1:])


def _local_output(output: Placement, _: nn.Module, result: Any, mesh: DeviceMesh) -> Tensor:
    local: Tensor = result.redistribute(mesh, [output]).to_local()
    return local
