"""Heartbeats in shared memory: one record a rank, written by the rank, read by its supervisor. No torch, no ray.

A beat is one `struct.pack_into` into a mapped file (about a microsecond), so the training loop may beat as often as it
likes and a rank that is blocked in a collective still shows where it is. One header byte carries the request to stop.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import cast, get_args

from orchestrator.plan.rank_task import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)
_HEADER_BYTES = 64
_RECORD_BYTES = 64
"""One cache line a rank, so that two ranks never write to the same one."""
_RECORD = struct.Struct("=dqi")
"""Monotonic clock (one machine: comparable between processes), step, index of the phase."""
_PACE = struct.Struct("=d")
"""Seconds of a rank's own work in its last step; 0: not known. Behind the record, written apart from it."""


class Board:
    """The mapped file. The supervisor creates it; ranks open it by path."""

    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        size = _HEADER_BYTES + ranks * _RECORD_BYTES
        with path.open("w+b" if create else "r+b") as file:
            if create:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self.ranks = ranks

    def beat(self, local_rank: int, phase: Phase, step: int) -> None:
        """Note that a rank is alive, what it does and in which step."""
        offset = _HEADER_BYTES + local_rank * _RECORD_BYTES
        _RECORD.pack_into(self._map, offset, time.monotonic(), step, PHASES.index(phase))

    def read(self, local_rank: int) -> tuple[Phase, int, float]:
        """(phase, step, seconds since the last beat) of a rank."""
        moment, step, phase = _RECORD.unpack_from(self._map, _HEADER_BYTES + local_rank * _RECORD_BYTES)
        return PHASES[phase], cast(int, step), max(0.0, time.monotonic() - moment)

    def pace(self, local_rank: int, own_seconds: float) -> None:
        """Note how long a rank's own work of its last step took, without waiting for others."""
        _PACE.pack_into(self._map, self._pace_offset(local_rank), own_seconds)

    def read_pace(self, local_rank: int) -> float:
        """Seconds of a rank's own work in its last step; 0 when it has not said."""
        (seconds,) = _PACE.unpack_from(self._map, self._pace_offset(local_rank))
        return cast(float, seconds)

    @staticmethod
    def _pace_offset(local_rank: int) -> int:
        return _HEADER_BYTES + local_rank * _RECORD_BYTES + _RECORD.size

    def clear(self) -> None:
        """Before new ranks start: nobody is asked to stop, everybody starts now."""
        self._map[0] = 0
        for local_rank in range(self.ranks):
            self.beat(local_rank, "starting", 0)
            self.pace(local_rank, 0.0)

    def ask_to_stop(self) -> None:
        """Ask all ranks of this board to save and stop."""
        self._map[0] = 1

    def stop_asked(self) -> bool:
        """Whether ranks were asked to save and stop."""
        return self._map[0] == 1

    def close(self) -> None:
        """Unmap; the file is its creator's to remove."""
        self._map.close()
