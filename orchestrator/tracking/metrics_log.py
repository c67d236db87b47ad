"""`metrics.jsonl`: the run's own record, one JSON object a line and step. Rank 0 writes it, everything else reads it.

MLflow is filled from this file (`forward.py`), never the other way round. A line is written with one system call, so a
killed writer leaves at most one torn last line, which the next writer cuts off. `rewind` moves the lines of steps that
will be run again to `metrics.rewound.jsonl`: what was executed stays countable.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)

REWOUND_NAME = "metrics.rewound.jsonl"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as the texts that `float()` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Whole lines of a record, without their line ends; a torn last line is left out. Nothing for a missing file."""
    try:
        with Path(path).open("rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    yield line[:-1]
    except FileNotFoundError:
        return


def read_records(path: str | os.PathLike[str], *, lists: bool = True) -> list[dict[str, Any]]:
    """All records of a file in order.

    Args:
        path: the file; a missing one has no records.
        lists: keep lists (the sample ids of a step). They are nearly all of a long run's record: leave them out where
            they are not needed.

    Raises:
        ValueError: a whole line is no JSON object; the message names the line.
    """
    records = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: {line[:80]!r}")
        records.append(record if lists else without_lists(record))
    return records


def without_lists(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record's plain values."""
    return {key: value for key, value in record.items() if not isinstance(value, list | dict)}


class MetricsLog:
    """Appends records to `metrics.jsonl`.

    Args:
        path: the file; its folder exists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = self._open()
        self._waiting: list[bytes] = []
        """Lines that a full disk has refused; they go first when there is room again."""

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        whole = _whole_bytes(descriptor)
        if whole != os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, whole)
        return descriptor

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. On return the line is with the operating system, in one piece.

        A disk that is full does not end training: the line waits, with a warning, and is written with a later one.
        """
        self._waiting.append(_line(record))
        data = b"".join(self._waiting)
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            if written != len(data):
                os.ftruncate(self._descriptor, before)
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were taken")
        except OSError as error:
            if len(self._waiting) == 1:
                _LOG.warning("%s cannot be written (%s); its lines wait in memory.", self.path, error)
            return
        self._waiting.clear()

    def rewind(self, step: int) -> int:
        """Drop every record after `step`, atomically: they move to `metrics.rewound.jsonl`. Returns how many.

        Called when a run goes on from a checkpoint of `step`: the steps after it are executed again.
        """
        kept: list[bytes] = []
        dropped: list[bytes] = []
        for line in read_lines(self.path):
            (dropped if json.loads(line)["step"] > step else kept).append(line + b"\n")
        if not dropped:
            return 0
        with self.path.with_name(REWOUND_NAME).open("ab") as stream:
            stream.write(b"".join(dropped))
            stream.flush()
            os.fsync(stream.fileno())
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("wb") as stream:
            stream.write(b"".join(kept))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.path)
        self.close()
        self._descriptor = self._open()
        return len(dropped)

    def close(self) -> None:
        """Release the file; the log can no longer be appended to."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _whole_bytes(descriptor: int) -> int:
    """Size of the file up to and including its last line end."""
    end = os.fstat(descriptor).st_size
    block_bytes = 1 << 16
    while end > 0:
        start = max(0, end - block_bytes)
        index = os.pread(descriptor, end - start, start).rfind(b"\n")
        if index >= 0:
            return start + index + 1
        end = start
    return 0
