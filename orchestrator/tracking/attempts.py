"""Every attempt of a run, over all its commands: what `summary.json` counts executed steps from.

The launcher hands its attempts over when it ends. A command that was killed never does; its attempts are then read
from the metrics, whose rewound lines are kept for this. The sum of `last_step - first_step + 1` is what was executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from orchestrator.tracking.metrics_log import REWOUND_NAME, MetricsLog, read_records

ATTEMPTS_NAME = "attempts.jsonl"


class Attempt(Protocol):
    """One life of the ranks, as the launcher reports it."""

    def to_dict(self) -> dict[str, Any]:
        """With `cause`, `first_step`, `last_step`, `seconds`, `world_size`; steps are None if none was done."""


def executed_steps(attempts: Iterable[Mapping[str, Any]]) -> int:
    """Optimizer steps that were executed, those done again after a restart included."""
    return sum(
        attempt["last_step"] - attempt["first_step"] + 1 for attempt in attempts if attempt["first_step"] is not None
    )


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """Attempts handed over so far, in order and numbered over all commands."""
    attempts = read_records(folder / ATTEMPTS_NAME)
    return [{**attempt, "number": number} for number, attempt in enumerate(attempts, start=1)]


def append_attempts(folder: Path, attempts: Iterable[Mapping[str, Any]]) -> None:
    """Add the attempts of a command, in order; each line is whole or not there."""
    log = MetricsLog(folder / ATTEMPTS_NAME)
    for attempt in attempts:
        log.append(attempt)
    log.close()


def attempts_from_metrics(folder: Path, *, since: float, world_size: int, cause: str) -> list[dict[str, Any]]:
    """What a command that never handed its attempts over has executed, from the lines it left.

    Args:
        folder: the run's folder.
        since: `time.time()` at which that command opened the run.
        world_size: ranks of its plan.
        cause: why the last of them ended; those before it ended in a restart of the ranks.
    """
    records = [
        record for name in ("metrics.jsonl", REWOUND_NAME) for record in read_records(folder / name, lists=False)
    ]
    lives: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record.get("time", 0.0) >= since:
            lives.setdefault(int(record.get("attempt", 1)), []).append(record)
    attempts = []
    for number in sorted(lives):
        life = sorted(lives[number], key=lambda record: int(record["step"]))
        first, last = life[0], life[-1]
        attempts.append(
            {
                "number": number,
                "cause": cause if number == max(lives) else "restart",
                "detail": "read from the metrics: its command did not live to report it",
                "first_step": int(first["step"]),
                "last_step": int(last["step"]),
                "seconds": float(last["time"]) - float(first["time"]) + float(first.get("step_seconds", 0.0)),
                "world_size": world_size,
            }
        )
    return attempts
