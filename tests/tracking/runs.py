"""Runs as the training command leaves them, and what an MLflow store has of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlflow.entities import Run, ViewType
from mlflow.tracking import MlflowClient

from orchestrator.tracking.metrics_log import MetricsLog
from orchestrator.tracking.run_directory import RunDirectory, open_run
from tests.core.run_cases import run_config, run_plan, step_record

TIMEOUT_SECONDS = 300


def create_database(path: Path) -> Path:
    """Let MLflow make its tables."""
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def new_run(folder: Path, uri: str | None = None, **overrides: Any) -> RunDirectory:
    """Open the run `a` under a folder, new or continued; `overrides` with `__` for dots."""
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    config = run_config(
        folder / "runs", {"run.name": "a", "tracking.uri": uri, "tracking.experiment": "toys", **values}
    )
    return open_run(config, run_plan(config))


def record(run: RunDirectory, steps: Iterable[int], *, attempt: int = 1, **more: Any) -> None:
    """What rank 0 writes."""
    log = MetricsLog(run.metrics)
    for step in steps:
        log.append(step_record(step, attempt=attempt, **more))
    log.close()


def rewind(run: RunDirectory, step: int) -> None:
    """What a restarted rank 0 does first."""
    log = MetricsLog(run.metrics)
    log.rewind(step)
    log.close()


def end(run: RunDirectory, status: str = "finished", attempts: int = 1, **more: Any) -> None:
    """What the command writes last."""
    causes = ["crash"] * (attempts - 1) + [status]
    run.write_json(
        "summary.json",
        {
            "status": status,
            "steps": 3,
            "attempts": [
                {"cause": cause, "first_step": 1, "last_step": 3, "recovery_seconds": 2.25 * number or None}
                for number, cause in enumerate(causes)
            ],
            "predicted": {"step_seconds": 0.4, "peak_bytes": None},
            "measured": {"step_seconds": 0.5, "peak_bytes": 1000},
            "mlflow_run_id": None,
            "checkpoint": "/run/checkpoints/step-00000003",
            **more,
        },
    )


def runs_of(uri: str, experiment: str = "toys") -> list[Run]:
    """All runs of an experiment."""
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    return list(client.search_runs([found.experiment_id], run_view_type=ViewType.ALL))


def only_run(uri: str, experiment: str = "toys") -> Run:
    """The one run that there must be."""
    (run,) = runs_of(uri, experiment)
    return run


def points(uri: str, key: str = "loss", *, experiment: str = "toys") -> Counter[int]:
    """How often each step of a metric is in the experiment's one run."""
    history = MlflowClient(uri).get_metric_history(only_run(uri, experiment).info.run_id, key)
    return Counter(point.step for point in history)


def once(steps: Iterable[int]) -> Counter[int]:
    """Each of these steps, once."""
    return Counter(dict.fromkeys(steps, 1))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Ask again and again until it holds; fails after a time that no healthy machine needs."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.1)
