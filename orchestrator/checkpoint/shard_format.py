"""How one tensor lies in a shard file: a small `torch.save` archive whose data are the tensor's bytes, uncopied.

`archive_around` gives what stands before and behind the bytes, so that they can be written straight from memory and
torch's own readers still load the file. `data_offset` finds the bytes in an archive, without unpickling, so that they
can be read straight into memory. The writer is `shard_writer.py`, the reader `shard_reader.py`.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
from torch.serialization import skip_data

HEADER_BYTES = 4096
"""No archive's data begin later than this; more is read if they should."""

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_SIGNATURE = b"PK\x03\x04"
_DATA_NAME = b"/data/0"


@lru_cache(maxsize=4096)
def archive_around(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What a `torch.save` archive of a contiguous host tensor has before and behind the tensor's bytes."""
    tensor = torch.empty(shape, dtype=dtype)  # never touched, so no memory is taken
    recorder = _Recorder()
    with skip_data():
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    size_bytes = tensor.numel() * tensor.element_size()
    before, behind = recorder.split(size_bytes)
    return before, behind


class _Recorder:
    """A stream that keeps what is written and notes where torch leaves room for data."""

    def __init__(self) -> None:
        self._written = bytearray()
        self._room: list[tuple[int, int]] = []

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def seek(self, distance: int, whence: int) -> None:
        if whence != 1:
            raise ValueError("torch.save seeks in a way that is not known here")
        self._room.append((len(self._written), distance))

    def flush(self) -> None:
        """Nothing is held back."""

    def split(self, size_bytes: int) -> tuple[bytes, bytes]:
        if not size_bytes:
            # The entry of an empty tensor leaves no room; it lies before the bytes of the next entry all the same.
            return bytes(self._written), b""
        if [room for _, room in self._room] != [size_bytes]:
            raise ValueError(f"torch.save leaves room {self._room} for {size_bytes} bytes")
        place = self._room[0][0]
        return bytes(self._written[:place]), bytes(self._written[place:])


def data_offset(archive: bytes | bytearray) -> int | None:
    """Where the tensor's bytes begin in the archive that starts here; None if more of its beginning is needed.

    torch writes archives as a stream, so that an entry's header does not say how long the entry is: the header of the
    data is found by its name.

    Raises:
        ValueError: it is no archive.
    """
    if not archive.startswith(_SIGNATURE):
        raise ValueError("it holds no tensor in the format of torch.save")
    at = 0
    while at >= 0 and at + _LOCAL_HEADER.size <= len(archive):
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(archive, at)
        begin = at + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if archive[at + _LOCAL_HEADER.size :][:name_bytes].endswith(_DATA_NAME):
            return begin if begin <= len(archive) else None
        at = archive.find(_SIGNATURE, at + 1)
    return None
