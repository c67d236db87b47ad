"""Writes a rank's part of a checkpoint in torch's distributed format, at the speed of the disk.

One file a rank, `__<rank>_0.distcp`, written in large pieces straight from the state's memory, checksummed meanwhile in
another thread, synced once. Torch's own readers load it too. What is decided here is the layout; which tensor is
written by whom is DCP's plan, where files go is `storage.py`'s business, when they count `write.py`'s.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future as Waiting
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from orchestrator.checkpoint.manifest import FileRecord, new_digest
from orchestrator.checkpoint.shard_format import archive_around
from orchestrator.checkpoint.storage import Folder, Sink

METADATA_NAME = ".metadata"
_PIECE_BYTES = 8 << 20
_PIECE_PARTS = 512
_PIECES_BEHIND = 4
"""That the checksum may lag behind the writing: where processors are busy its thread gets its turn late, and the disk
must not wait for that. A tensor that was copied for the writing is held as long."""


class ShardWriter(StorageWriter):
    """One save, seen from one rank.

    Args:
        folder: where the files go; it is there already.
        prefix: before the file's names in `records`.
    """

    def __init__(self, folder: Folder, prefix: str = "") -> None:
        self._folder = folder
        self._prefix = prefix
        self.records: list[FileRecord] = []
        """What this rank has written, with sizes and checksums."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to be done: a writer is made for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to be done: rank 0 has made the folder."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As DCP made it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the name of its file."""
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the rank's items into its file; it is on the disk when this returns."""
        results: list[WriteResult] = []
        if plan.items:
            results = self._write_items(plan.storage_data, plan.items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write which tensor lies where (rank 0)."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        with _File(self._folder, METADATA_NAME, 0) as file:
            file.write(pickle.dumps(metadata))
        self.records.append(file.record(self._prefix))

    def storage_meta(self) -> StorageMeta | None:
        """Where it lies."""
        return StorageMeta(checkpoint_id=str(self._folder))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any: the folder was opened before."""
        return True

    def _write_items(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        entries = [(item, *_around(item, planner)) for item in items]
        with _File(self._folder, name, sum(size_bytes for *_, size_bytes in entries)) as file:
            for item, before, behind, _ in entries:
                offset = file.size_bytes
                data = planner.resolve_data(item)
                file.write(before)
                file.write(_bytes_of(data))
                file.write(behind)
                length = file.size_bytes - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        self.records.append(file.record(self._prefix))
        return results


def _around(item: WriteItem, planner: SavePlanner) -> tuple[bytes, bytes, int]:
    """(what stands before an item's bytes, what behind, bytes of all of it)."""
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        return b"", b"", data.getbuffer().nbytes
    before, behind = archive_around(data.dtype, tuple(data.shape))
    return before, behind, len(before) + data.numel() * data.element_size() + len(behind)


def _bytes_of(data: torch.Tensor | io.BytesIO) -> memoryview:
    """The bytes of an item; a tensor is copied only when it lies on a device or in pieces."""
    if isinstance(data, io.BytesIO):
        return data.getbuffer()
    flat = data.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class _File:
    """One file on its way to storage: collects small pieces, writes large ones, computes the checksum beside it."""

    def __init__(self, folder: Folder, name: str, size_bytes: int) -> None:
        self._name = name
        self._sink: Sink = folder.create(name, size_bytes)
        self._digest = new_digest()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._waiting: list[memoryview] = []
        self._waiting_bytes = 0
        self._unchecked: deque[Waiting[None]] = deque()
        self.size_bytes = 0

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                self._sink.close()
                while self._unchecked:
                    self._unchecked.popleft().result()
        except BaseException:
            kind = BaseException
            raise
        finally:
            self._threads.shutdown()
            if kind is not None:
                self._sink.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, which must not change until the file is closed."""
        for piece in _pieces(memoryview(data)):
            self._waiting.append(piece)
            self._waiting_bytes += len(piece)
            self.size_bytes += len(piece)
            if self._waiting_bytes >= _PIECE_BYTES or len(self._waiting) >= _PIECE_PARTS:
                self._flush()

    def _flush(self) -> None:
        parts, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._unchecked.append(self._threads.submit(self._update, parts))
        self._sink.write(parts)
        while len(self._unchecked) > _PIECES_BEHIND:
            self._unchecked.popleft().result()

    def _update(self, parts: list[memoryview]) -> None:
        for part in parts:
            self._digest.update(part)

    def record(self, prefix: str) -> FileRecord:
        """What the manifest says of it; only once it is closed."""
        return FileRecord(f"{prefix}{self._name}", self.size_bytes, self._digest.hexdigest())


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), _PIECE_BYTES):
        yield data[begin : begin + _PIECE_BYTES]
