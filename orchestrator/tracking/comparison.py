"""Runs side by side: what each planned, learned and took, and which of those that learn the same was best. Pure.

`mlflow_read.py` reads the records. Two runs are the same training when they agree in every setting that changes what
is learned (`identity.py`); only among those does "faster" mean better, and their losses must agree but for rounding.
What a record does not hold is None; nothing is calculated from a plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.tracking.identity import PLAN_PREFIX, learned_settings

SCHEMA_VERSION = 1
AXES = ("data", "tensor", "pipeline", "context")
QUANTITIES = ("step_seconds", "tokens_per_second", "mfu", "peak_bytes")
"""What is predicted and measured, by the names of `summary.json`."""
_STATUS = {
    "RUNNING": "running",
    "SCHEDULED": "running",
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
}
_NOT_SETTINGS = ("run.", "tracking.", PLAN_PREFIX)
"""Names and places, and what follows from the settings."""
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What MLflow holds of one run."""

    run_id: str
    name: str
    status: str
    """MLflow's own word."""
    started_ms: int
    steps: int | None
    """The last step of which it has a loss."""
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]
    """The last value of each."""
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One row: bytes, seconds, nats; rates over all ranks."""

    run_id: str
    name: str
    status: str
    """running, finished, failed or stopped."""
    started_ms: int
    training: int
    """Number of the training that it is: runs with the same number learn the same."""
    plan: dict[str, Any]
    """What the plan decided; empty where the record does not say."""
    replanned: bool
    """Whether the run went on under another plan than it began with; `plan` is the first. What was measured is of both,
    so that nothing is predicted of it and it is not ranked."""
    device: str | None
    gpu: str | None
    steps: int | None
    loss: float | None
    validation_loss: float | None
    validation_nats_per_byte: float | None
    predicted: dict[str, float | None]
    measured: dict[str, float | None]
    difference: dict[str, float | None]
    """(measured - predicted) / predicted."""
    restarts: int | None
    cost_per_billion_tokens: float | None
    """Price of the GPUs for a billion tokens at the measured rate, in the currency of `cluster.gpu.price_per_hour`."""
    run_directory: str | None


@dataclass(frozen=True, slots=True)
class Training:
    """Runs that learn the same."""

    number: int
    runs: tuple[str, ...]
    """Ids, the fastest first; those without a rate last."""
    fastest: str | None
    """Id of the one with the most tokens a second, where at least two have a rate."""
    advantage: float | None
    """Its rate over that of the next."""
    cheapest: str | None
    """Id of the one whose tokens cost least, where at least two have a price."""
    leanest: str | None
    """Id of the one whose fullest rank held least, where at least two were measured."""
    loss_spread: float | None
    """Largest difference between the final losses of its finished runs, relative to the smallest."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]
    trainings: tuple[Training, ...]
    lowest_validation: str | None
    """Id of the run with the lowest validation loss, where all of them learn from the same data."""
    settings: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """Settings in which the runs differ: key -> {run id: value, None where it has none}."""

    def to_dict(self) -> dict[str, Any]:
        """The comparison for machines."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Put records side by side, by training in the order of the newest run of each, the fastest run first."""
    newest_first = sorted(records, key=lambda record: -record.started_ms)
    numbers: dict[tuple[tuple[str, str], ...], int] = {}
    rows = []
    for record in newest_first:
        identity = tuple(sorted(learned_settings(record.parameters).items()))
        rows.append(_row(record, numbers.setdefault(identity, len(numbers) + 1)))
    rows.sort(key=lambda row: (row.training, -(row.measured["tokens_per_second"] or 0.0)))
    grouped = [[row for row in rows if row.training == number] for number in numbers.values()]
    return Comparison(
        runs=tuple(rows),
        trainings=tuple(_training(group) for group in grouped),
        lowest_validation=_lowest_validation(newest_first, rows),
        settings=_differing_settings(newest_first),
    )


def _row(record: RunRecord, number: int) -> ComparedRun:
    metrics, settings = record.metrics, record.parameters
    replanned = any(key.startswith(f"changed.{PLAN_PREFIX}") for key in record.tags)
    predicted = {key: None if replanned else metrics.get(f"predicted.{key}") for key in QUANTITIES}
    measured = {key: metrics.get(f"measured.{key}") for key in QUANTITIES}
    if not any(value is not None for value in measured.values()):
        # Not ended yet, or never: what its newest step says.
        latest = {"peak_bytes": "memory_bytes"}
        measured = {key: metrics.get(latest.get(key, key)) for key in QUANTITIES}
    plan = {
        key.removeprefix(PLAN_PREFIX): _value(text) for key, text in settings.items() if key.startswith(PLAN_PREFIX)
    }
    return ComparedRun(
        run_id=record.run_id,
        name=record.name,
        status=_STATUS.get(record.status, record.status.lower()),
        started_ms=record.started_ms,
        training=number,
        plan=plan,
        replanned=replanned,
        device=settings.get("cluster.device"),
        gpu=settings.get("cluster.gpu.name"),
        steps=record.steps,
        loss=metrics.get("loss"),
        validation_loss=metrics.get("validation_loss"),
        validation_nats_per_byte=metrics.get("validation_nats_per_byte"),
        predicted=predicted,
        measured=measured,
        difference={key: _difference(measured[key], predicted[key]) for key in QUANTITIES},
        restarts=_whole(record.tags.get("orchestrator.restarts")),
        cost_per_billion_tokens=None if replanned else _cost(settings, plan, measured["tokens_per_second"]),
        run_directory=record.tags.get("orchestrator.run_directory"),
    )


def _training(runs: Sequence[ComparedRun]) -> Training:
    rated = [run for run in runs if run.measured["tokens_per_second"] and not run.replanned]
    rates = [run.measured["tokens_per_second"] or 0.0 for run in rated]
    priced = [(cost, run.run_id) for run in runs if (cost := run.cost_per_billion_tokens) is not None]
    weighed = [
        (held, run.run_id) for run in runs if (held := run.measured["peak_bytes"]) is not None and not run.replanned
    ]
    ends = [run.loss for run in runs if run.status == "finished" and run.loss is not None]
    several = len(rated) > 1
    return Training(
        number=runs[0].training,
        runs=tuple(run.run_id for run in runs),
        fastest=rated[0].run_id if several else None,
        advantage=rates[0] / rates[1] if several else None,
        cheapest=min(priced)[1] if len(priced) > 1 else None,
        leanest=min(weighed)[1] if len(weighed) > 1 else None,
        loss_spread=(max(ends) - min(ends)) / abs(min(ends)) if len(ends) > 1 and min(ends) else None,
    )


def _lowest_validation(records: Sequence[RunRecord], rows: Sequence[ComparedRun]) -> str | None:
    """Of all runs, whatever they train, where the same text is kept back to validate on."""
    texts = {
        tuple(record.parameters.get(f"data.{key}") for key in ("source", "path", "validation_fraction"))
        for record in records
    }
    if len(texts) != 1:
        return None
    judged = [(run.validation_nats_per_byte, run.run_id) for run in rows if run.validation_nats_per_byte is not None]
    return min(judged)[1] if len(judged) > 1 else None


def _differing_settings(records: Sequence[RunRecord]) -> dict[str, dict[str, str | None]]:
    keys = sorted({key for record in records for key in record.parameters if not key.startswith(_NOT_SETTINGS)})
    found = {}
    for key in keys:
        values = {record.run_id: record.parameters.get(key) for record in records}
        if len(set(values.values())) > 1:
            found[key] = values
    return found


def _difference(measured: float | None, predicted: float | None) -> float | None:
    return None if measured is None or not predicted else (measured - predicted) / predicted


def _cost(settings: Mapping[str, str], plan: Mapping[str, Any], tokens_per_second: float | None) -> float | None:
    price, gpus = _value(settings.get("cluster.gpu.price_per_hour")), plan.get("world_size")
    if not isinstance(price, int | float) or not isinstance(gpus, int) or not tokens_per_second:
        return None
    return price * gpus * 1e9 / (tokens_per_second * _SECONDS_PER_HOUR)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _value(text: str | None) -> Any:
    """A parameter as it was before MLflow made a text of it; a text that is nothing else stays one."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
