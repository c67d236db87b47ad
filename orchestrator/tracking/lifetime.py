"""When a run began and ended, by its own record: what MLflow shows as its start and duration. Pure but for the reading.

A run begins with its first command and ends with its last, however late its record is sent. A command that was killed
has written no end: then its last step is the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.tracking.metrics_log import read_records
from orchestrator.tracking.run_directory import HISTORY_NAME
from orchestrator.tracking.tail import timestamp_ms


def began_ms(folder: Path) -> int | None:
    """Milliseconds since 1970; None where the record does not say."""
    times = _times(folder / HISTORY_NAME) or _times(folder / "metrics.jsonl")
    return times[0] if times else None


def ended_ms(folder: Path) -> int | None:
    """Milliseconds since 1970; None where the record does not say."""
    times = [*_times(folder / HISTORY_NAME), *_times(folder / "metrics.jsonl")]
    return max(times, default=None)


def _times(path: Path) -> list[int]:
    try:
        records: list[dict[str, Any]] = read_records(path, lists=False)
    except ValueError:
        return []  # damaged, which is for the next command to say
    return [timestamp_ms(record) for record in records if "time" in record]
