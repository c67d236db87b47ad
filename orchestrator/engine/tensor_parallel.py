"""Tensor parallelism: the words of a model's sharding table become styles, once for all models.

Without sequence parallelism the residual stream is whole on every tensor rank; with it, each rank holds its part of the
sequence between the blocks' matrices. Every parameter becomes a DTensor on the tensor axis, the replicated ones too, so
that norm, clipping and checkpoints count each element once. The logits stay cut along the vocabulary (`loss.py`).
What a layer then computes: `tensor_layers.py`; what travels: `tensor_collectives.py`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from models.parameters import ShardingTable, Style
from orchestrator.engine.dropout import OwnMasks
from orchestrator.engine.tensor_layers import Colwise, CutEmbedding, CutHead, GatherInput, Norm, Rowwise, WholeEmbedding


def apply_tensor_parallel(
    model: nn.Module, tensor: DeviceMesh, table: ShardingTable, *, sequence_parallel: bool
) -> None:
    """Cut the model over the tensor axis, in place; its parameters may still be on the meta device.

    Raises ValueError for a module with parameters that the table does not name.
    """
    if tensor.size() == 1:
        return
    for name, module in list(model.named_modules()):
        style = _style_of(name, table)
        if style is not None:
            parallelize_module(module, tensor, _engine_style(style, cut=sequence_parallel))
    model.tie_weights()  # type: ignore[operator]
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise ValueError(f"the model's sharding table says nothing of {', '.join(whole)}")


def _style_of(name: str, table: ShardingTable) -> Style | None:
    for pattern, style in table.styles:
        if pattern.count(".") == name.count(".") and fnmatchcase(name, pattern):
            return style
    return None


def _engine_style(style: Style, *, cut: bool) -> ParallelStyle:
    """The style of a word; `cut`: whether the residual stream is cut along the sequence between blocks. See
    `models/parameters.py`."""
    styles: dict[Style, ParallelStyle] = {
        "vocabulary_embedding": CutEmbedding(cuts_sequence=cut),
        "scatter_output": WholeEmbedding(cuts_sequence=cut),
        "norm": Norm(cuts_sequence=cut),
        # Once for all products behind it, so that their input gradients are summed before they are reduced.
        "gather_input": GatherInput(cuts_sequence=cut),
        "colwise": Colwise(cuts_sequence=cut),
        "rowwise": Rowwise(cuts_sequence=cut),
        "vocabulary_head": CutHead(cuts_sequence=cut),
        "stream_dropout": OwnMasks() if cut else AsItIs(),
        "head_dropout": OwnMasks(),
    }
    return styles[style]


class AsItIs(ParallelStyle):
    """A module without parameters that computes the same on all tensor ranks from the same input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module
