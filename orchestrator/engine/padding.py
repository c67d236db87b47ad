"""Rows of the embedding and the head beyond the vocabulary: there in memory, nowhere else.

`plan/vocabulary.py` says when there are any. The loss leaves them out (`loss.py`), so their gradients are zero and they
stay zero. Initial values, checkpoints and comparisons see `logical` tensors: the vocabulary's own shape and rows,
sharing memory with the padded ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from models.parameters import ParameterSpec, ShardingTable
from orchestrator.engine.gradients import local
from orchestrator.engine.initialise import offsets
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.vocabulary import padded_rows


@dataclass(frozen=True, slots=True)
class Padding:
    """Which parameters have padded rows."""

    rows: Mapping[str, int]
    """Logical rows by parameter name; empty: nothing is padded."""

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of parameter `name` (itself, its gradient, a state of its optimizer) without padded rows.

        Shares its memory. What has no padding is given back as it is.
        """
        rows = self.rows.get(name)
        if rows is None or tensor.dim() == 0:
            return tensor
        assert isinstance(tensor, DTensor), "padded rows are cut over ranks"
        part, first = local(tensor).detach(), offsets(tensor)[0]
        kept = part[: max(0, min(part.shape[0], rows - first))]
        mesh, placements = _one_cut(tensor.device_mesh, tensor.placements)
        shape = torch.Size((rows, *tensor.shape[1:]))
        return DTensor.from_local(kept, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())

    @torch.no_grad()
    def clear(self, parameters: Mapping[str, Tensor]) -> None:
        """Make all padded rows zero."""
        for name in self.rows.keys() & parameters.keys():
            kept = local(self.logical(name, parameters[name])).shape[0]
            local(parameters[name])[kept:] = 0


def padding_of(plan: RunPlan, specs: Sequence[ParameterSpec], table: ShardingTable) -> Padding:
    """The padding of a plan's model: of the matrices whose rows are tokens, where there is any."""
    assert plan.parallel is not None
    vocabulary = plan.config.model.vocab_size
    if padded_rows(vocabulary, plan.parallel) == vocabulary:
        return Padding({})
    modules = [name for name, style in table.styles if style in ("vocabulary_embedding", "vocabulary_head")]
    names = {f"{module}.weight" for module in modules}
    return Padding({spec.name: vocabulary for spec in specs if spec.name in names})


def _one_cut(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[DeviceMesh, list[Placement]]:
    """The same ranks with the rows cut once, over tensor ranks and within those over the sharded copy's ranks.

    So it is because all parts are equal (`padded_rows`). No process group belongs to this mesh: it describes.
    """
    cut = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    ranks = mesh.mesh
    if len(cut) == 2:
        copy, tensor = cut
        assert tensor == ranks.dim() - 1, "tensor ranks are the innermost axis"
        ranks = ranks.movedim(copy, -1).flatten(-2)
    whole: list[Placement] = [Replicate()] * (ranks.dim() - 1)
    return DeviceMesh(mesh.device_type, ranks, _init_backend=False), [*whole, Shard(0)]
