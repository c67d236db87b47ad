"""Files in the safetensors format as bytes: which tensor lies where, parts of one, and a writer that streams. No torch.

The format is eight bytes of length, a JSON header, then the values; the library's own reader maps whole files and its
writer wants all tensors of a file at once, while here no more than a block is held. Refuses files that are cut, whose
header does not agree with their size, and types that hold no plain numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from orchestrator.checkpoint.storage import Folder, StorageError, read_at

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types whose values can become weights; integers and 8-bit floats are quantised weights without their scales."""

BLOCK_BYTES = 32 << 20
"""Most bytes of a tensor that are held at a time (one row at least)."""

_PIECE_BYTES = 4096
"""Columns are read by themselves from this size on; of smaller pieces the disk would deliver the neighbours too."""
_LARGEST_HEADER_BYTES = 100 << 20
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the values of a tensor lie, row after row, little-endian."""

    name: str
    dtype: str
    """In the words of the format: F32, BF16 ..."""
    shape: tuple[int, ...]
    folder: Folder
    file: str
    begin: int
    """First byte in the file."""
    size_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one value. Raises KeyError for a type outside `ITEM_BYTES`."""
        return ITEM_BYTES[self.dtype]


def read_header(folder: Folder, file: str) -> dict[str, StoredTensor]:
    """Every tensor of a file.

    Raises ValueError when it cannot be read or is no whole file of the format; the message says why, without the path.
    Raises StorageError when an object store does not answer: nothing is known then.
    """
    try:
        size = folder.size_bytes(file)
        with folder.open(file) as stream:
            length = int.from_bytes(_bytes_at(stream, 0, min(size, 8)), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
                raise ValueError(f"it has {size} bytes and is no safetensors file, or it is cut")
            header = json.loads(_bytes_at(stream, 8, length))
    except StorageError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("it does not begin with the header of a safetensors file") from None
    if not isinstance(header, dict):
        raise ValueError("it does not begin with the header of a safetensors file")
    first = 8 + length
    tensors = {
        name: _stored(name, entry, folder, file, first) for name, entry in header.items() if name != "__metadata__"
    }
    needed = max((tensor.begin + tensor.size_bytes for tensor in tensors.values()), default=first)
    if size != needed:
        raise ValueError(f"it has {size} bytes and its header describes {needed}: it is cut or damaged")
    return tensors


def _stored(name: str, entry: Any, folder: Folder, file: str, first: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its header does not say where {name} lies") from None
    wanted = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if begin < 0 or end < begin or (dtype in ITEM_BYTES and end - begin != wanted):
        raise ValueError(f"its header gives {name} {end - begin} bytes, {dtype} {list(shape)} needs {wanted}")
    return StoredTensor(name, dtype, shape, folder, file, first + begin, end - begin)


def read_blocks(
    tensor: StoredTensor, start: Sequence[int], extent: Sequence[int], block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, int, bytearray]]:
    """The values of one region (`start` and `extent` by dimension), in blocks of whole rows of the region.

    Yields (first row counted from `start`, rows, bytes). Only the region is read, or whole rows of the tensor where a
    row's part is shorter than a page. Raises OSError when the file ends early.
    """
    shape, item = (*tensor.shape, 1)[:2], tensor.item_bytes
    (top, left), (rows, columns) = (*start, 0)[:2], (*extent, 1)[:2]
    if rows * columns == 0:
        return
    row_bytes, piece = shape[1] * item, columns * item
    whole = columns == shape[1] or piece < _PIECE_BYTES
    step = max(1, block_bytes // (row_bytes if whole else piece))
    with tensor.folder.open(tensor.file) as stream:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            place = tensor.begin + (top + first) * row_bytes
            if columns == shape[1]:
                yield first, count, _read(stream, place, count * row_bytes, tensor)
            elif whole:
                lines = memoryview(_read(stream, place, count * row_bytes, tensor))
                offsets = (row * row_bytes + left * item for row in range(count))
                yield first, count, bytearray(b"".join(lines[offset : offset + piece] for offset in offsets))
            else:
                places = (place + row * row_bytes + left * item for row in range(count))
                pieces = (_read(stream, offset, piece, tensor) for offset in places)
                yield first, count, bytearray(b"".join(pieces))


def _read(stream: BinaryIO, place: int, size: int, tensor: StoredTensor) -> bytearray:
    data = _bytes_at(stream, place, size)
    if len(data) < size:
        raise OSError(f"{tensor.folder.child(tensor.file)} ends inside {tensor.name}")
    return data


def _bytes_at(stream: BinaryIO, place: int, size: int) -> bytearray:
    """So many bytes from a place on, fewer where the file ends before."""
    data = bytearray(size)
    done = read_at(stream, place, memoryview(data))
    return data if done == size else data[:done]


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of the same type and shape hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    start = (0,) * len(one.shape)
    pairs = zip(read_blocks(one, start, one.shape), read_blocks(other, start, other.shape), strict=True)
    return all(left[2] == right[2] for left, right in pairs)


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file that holds these tensors (name -> type and shape) one after another, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
