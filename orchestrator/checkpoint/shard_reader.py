"""Reads checkpoints in torch's distributed format from any storage, straight into the state's memory.

Only the bytes that a rank asks for are read where they lie in one piece (a whole shard, or some of its rows); at most
one shard more than the state is held. Reads what torch's own writer has written too. Which shards are needed is DCP's
plan; strictness and damage are `read.py`'s business.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from orchestrator.checkpoint.shard_format import HEADER_BYTES, data_offset
from orchestrator.checkpoint.shard_writer import METADATA_NAME
from orchestrator.checkpoint.storage import Folder, read_at

Chunk = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor as it lies in a file."""


class ShardReader(StorageReader):
    """One load, seen from one rank.

    Args:
        folder: where the files of the checkpoint lie.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._metadata = Metadata(state_dict_metadata={})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to be done: a reader is made for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensor lies where."""
        metadata = pickle.loads(self._folder.read(METADATA_NAME))
        assert isinstance(metadata, Metadata)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep what rank 0 has read."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As DCP made it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As DCP made them."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any: the folder was opened before."""
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, file by file from the front to the back."""
        places = self._metadata.storage_data
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(places[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            with self._folder.open(name) as stream:
                for item in sorted(items, key=lambda item: int(places[item.storage_index].offset)):
                    self._read_item(stream, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, stream: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        place = self._metadata.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            data = bytearray(place.length)
            read_fully(stream, place.offset, memoryview(data))
            planner.load_bytes(item, io.BytesIO(data))
            return
        target = planner.resolve_tensor(item).detach()
        chunk = chunk_of(self._metadata, item.storage_index)
        read_part(stream, place.offset, chunk, item.storage_offsets, target)
        planner.commit_tensor(item, target)


def chunk_of(metadata: Metadata, index: MetadataIndex) -> Chunk:
    """Shape and type of the shard that an index names."""
    stored = metadata.state_dict_metadata[index.fqn]
    assert isinstance(stored, TensorStorageMetadata)
    for chunk in stored.chunks:
        if chunk.offsets == index.offset:
            return chunk.sizes, stored.properties.dtype
    raise ValueError(f"the metadata knows no shard of {index.fqn} at {index.offset}")


def read_part(stream: BinaryIO, archive_at: int, chunk: Chunk, offsets: Sequence[int], target: torch.Tensor) -> None:
    """Fill `target` with the part of a stored shard that begins at `offsets` and has the target's shape."""
    shape, dtype = chunk
    sizes = target.shape
    row_bytes = dtype.itemsize * (shape[1:].numel() if shape else 1)
    whole_rows = len(shape) > 0 and sizes[1:] == shape[1:]
    begin = archive_at + find_data(stream, archive_at)
    if not shape or whole_rows:
        _read_into(stream, begin + (offsets[0] * row_bytes if shape else 0), dtype, target)
        return
    # The rows that are needed, in full; then the columns of them.
    first, count = offsets[0], sizes[0]
    held = torch.empty((count, *shape[1:]), dtype=dtype)
    _read_into(stream, begin + first * row_bytes, dtype, held)
    for dim in range(1, len(shape)):
        held = held.narrow(dim, offsets[dim], sizes[dim])
    target.copy_(held)


def _read_into(stream: BinaryIO, at: int, dtype: torch.dtype, target: torch.Tensor) -> None:
    if not target.numel():
        return
    direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    held = target if direct else torch.empty(target.shape, dtype=dtype)
    read_fully(stream, at, held.reshape(-1).view(torch.uint8).numpy().data)
    if not direct:
        target.copy_(held)


def find_data(stream: BinaryIO, archive_at: int) -> int:
    """Where a tensor's bytes begin, seen from the beginning of its archive."""
    wanted = HEADER_BYTES
    while True:
        head = bytearray(wanted)
        count = read_at(stream, archive_at, memoryview(head))
        found = data_offset(head[:count])
        if found is not None:
            return found
        if count < wanted:
            raise ValueError("the file ends before its tensor begins")
        wanted *= 4


def read_fully(stream: BinaryIO, at: int, buffer: memoryview) -> None:
    """Fill a buffer from a place of a file. Raises ValueError when the file ends before."""
    if read_at(stream, at, buffer) < len(buffer):
        raise ValueError("the file ends before its tensor does")
