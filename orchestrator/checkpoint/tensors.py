"""The tensors of one checkpoint, one at a time and whole, whatever plan wrote them and on however many ranks.

For tools that go through a checkpoint in one process (export): no process group, no model, no more than the tensor
asked for. Loading a run's state is in `read.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from orchestrator.checkpoint.folder import Checkpoint
from orchestrator.checkpoint.read import data_folder
from orchestrator.checkpoint.shard_reader import ShardReader
from orchestrator.checkpoint.write import without_single_process_warning


class CheckpointTensors:
    """What lies in a checkpoint, by flattened name (`model.layers.0.attention.q_proj.weight`)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reader = _OnceReader(data_folder(checkpoint))
        self._stored = {
            name: stored
            for name, stored in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def names(self) -> frozenset[str]:
        """Every tensor; plain values are left out."""
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._stored[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """As it was saved."""
        return self._stored[name].properties.dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor in host memory. Raises OSError or ValueError when a file cannot be read."""
        target = torch.empty(self.shape(name), dtype=self.dtype(name))
        try:
            with without_single_process_warning():
                load_shards({name: target}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise next(cause for cause, _ in error.failures.values()) from None
        return target


class _OnceReader(ShardReader):
    """Keeps the metadata, which would else be read again for each tensor."""

    _known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensor lies where."""
        if self._known is None:
            self._known = super().read_metadata(*args, **kwargs)
        return self._known
