"""The ranks that share each layer's matrices, as the code that computes with their parts needs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """One tensor axis. Plain values, so that compiled graphs may hold them."""

    name: str
    """Of the process group, for functional collectives."""
    size: int
    rank: int
    cuts_sequence: bool
    """Whether each rank holds its part of the sequence between the blocks' matrices."""

    @property
    def processes(self) -> dist.ProcessGroup:
        """For collectives outside of compiled graphs."""
        return _resolve_process_group(self.name)  # type: ignore[arg-type]


def tensor_group(mesh: DeviceMesh, *, cuts_sequence: bool) -> TensorGroup:
    """The group of a mesh with one axis."""
    return TensorGroup(str(mesh.get_group().group_name), mesh.size(), mesh.get_local_rank(), cuts_sequence)
