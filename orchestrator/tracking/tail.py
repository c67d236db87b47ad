"""Reading `metrics.jsonl` while it grows and is rewound, and what of it is still to be sent. Pure but for the reading.

A rewind replaces the file; the tail sees that and starts again from its beginning. Which steps have been sent already
is decided by their number (`Sent`), so a step that is executed twice is sent once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.tracking.metrics_log import without_lists

_NOT_METRICS = ("step", "attempt", "time")
_VALIDATION = "validation_"


@dataclass(frozen=True, slots=True)
class Sent:
    """How far the record has been sent; 0 means nothing."""

    step: int = 0
    validation_step: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One number of one step."""

    key: str
    value: float
    step: int
    timestamp_ms: int
    """From the record, so that the same line sent twice is the same point."""


class MetricsTail:
    """Records appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(new records, whether they are the whole file again because it was rewound).

        A torn last line waits for its end. Lists (sample ids) are left out: an outage may make this wait long.
        """
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return [], False
        with stream:
            status = os.fstat(stream.fileno())
            rewound = self._inode not in (-1, status.st_ino) or status.st_size < self._offset
            if rewound:
                self._offset = 0
            self._inode = status.st_ino
            stream.seek(self._offset)
            return list(self._whole_lines(stream)), rewound

    def _whole_lines(self, stream: BinaryIO) -> Iterator[dict[str, Any]]:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            yield without_lists(json.loads(line))


def points_of(record: Mapping[str, Any], sent: Sent) -> list[Point]:
    """The numbers of a record that are still to be sent; `loss` comes last, as the sign that a step is complete."""
    step = int(record["step"])
    points = []
    for key, value in record.items():
        if key in _NOT_METRICS or isinstance(value, bool) or not _is_number(value):
            continue
        if step > (sent.validation_step if key.startswith(_VALIDATION) else sent.step):
            points.append(Point(key, float(value), step, timestamp_ms(record)))
    points.sort(key=lambda point: point.key == "loss")
    return points


def after(sent: Sent, points: list[Point]) -> Sent:
    """How far the record has been sent once these points have."""
    steps = [point.step for point in points if not point.key.startswith(_VALIDATION)]
    validations = [point.step for point in points if point.key.startswith(_VALIDATION)]
    return Sent(max([sent.step, *steps]), max([sent.validation_step, *validations]))


def timestamp_ms(record: Mapping[str, Any]) -> int:
    """Time of a record in milliseconds since 1970."""
    return int(float(record.get("time", 0.0)) * 1000)


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return True
    # The record writes what JSON cannot (nan, inf) as text.
    return isinstance(value, str) and value in ("nan", "inf", "-inf") and not math.isfinite(float(value))
