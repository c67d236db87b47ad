"""One MLflow run of one training run, written by the forwarder process alone; `mlflow_read.py` reads.

Nothing else imports MLflow.

Every call may fail because a server is away; the caller tries again. Repeating any call is harmless: a run is found
again by its token, points carry their own timestamps, parameters are compared first, tags are overwritten.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from orchestrator.tracking.destination import artifact_location, database_path, shown
from orchestrator.tracking.tail import Point

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

TOKEN_TAG = "orchestrator.token"
POINTS_PER_CALL = 1000
_ITEMS_PER_CALL = 100
"""MLflow's own limits of one `log_batch`."""
_PARAM_CHARACTERS = 6000
_TAG_CHARACTERS = 5000
"""Longest values that every MLflow store takes."""
_GONE = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")


class RunIsGoneError(Exception):
    """The run that was noted down, or asked for by MLFLOW_RUN_ID, is not there (any more)."""


class MlflowRun:
    """A run in a tracking store. Making one connects to the store."""

    def __init__(self, uri: str, run_id: str, client: MlflowClient | None = None) -> None:
        self.run_id = run_id
        self._uri = uri
        self._client = client or MlflowClient(tracking_uri=uri)

    @staticmethod
    def create(uri: str, experiment: str, run_name: str, token: str, began_ms: int | None) -> MlflowRun:
        """The run with this token: found again if it was created before, else created with its true start."""
        make_database(uri)
        client = MlflowClient(tracking_uri=uri)
        experiment_id = _experiment_id(client, uri, experiment)
        found = client.search_runs([experiment_id], filter_string=f"tags.`{TOKEN_TAG}` = '{token}'", max_results=1)
        if found:
            return MlflowRun(uri, found[0].info.run_id, client)
        run = client.create_run(experiment_id, start_time=began_ms, run_name=run_name, tags={TOKEN_TAG: token})
        return MlflowRun(uri, run.info.run_id, client)

    def resume(self) -> None:
        """Set the run going again.

        Raises:
            RunIsGoneError: it does not exist or lies in the trash.
        """
        try:
            run = self._client.get_run(self.run_id)
        except MlflowException as error:
            if error.error_code in _GONE:
                raise RunIsGoneError(f"MLflow run {self.run_id} does not exist in {shown(self._uri)}") from error
            raise
        if run.info.lifecycle_stage != "active":
            raise RunIsGoneError(f"MLflow run {self.run_id} in {shown(self._uri)} has been deleted")
        self._client.update_run(self.run_id, status="RUNNING")

    def stamps(self, key: str) -> set[tuple[int, int]]:
        """(step, timestamp in ms) of all points of a metric that the store has."""
        return {(point.step, point.timestamp) for point in self._client.get_metric_history(self.run_id, key)}

    def log_points(self, points: Sequence[Point]) -> None:
        """Write at most `POINTS_PER_CALL` points in one transaction of the store."""
        metrics = [Metric(point.key, point.value, point.timestamp_ms, point.step) for point in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Write parameters. One that the run has with another value keeps it; the new one becomes a `changed.` tag."""
        texts = {key: _text(value, _PARAM_CHARACTERS) for key, value in parameters.items()}
        present = self._client.get_run(self.run_id).data.params
        new = [Param(key, text) for key, text in texts.items() if key not in present]
        for chunk in _chunks(new, _ITEMS_PER_CALL):
            self._client.log_batch(self.run_id, params=chunk)
        changed = {key: text for key, text in texts.items() if key in present and present[key] != text}
        self.set_tags({f"changed.{key}": f"{present[key]} -> {text}" for key, text in changed.items()})

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Write tags. One that the store refuses for its name is left out, with a line in the log."""
        items = [RunTag(key, _text(value, _TAG_CHARACTERS)) for key, value in tags.items()]
        for chunk in _chunks(items, _ITEMS_PER_CALL):
            try:
                self._client.log_batch(self.run_id, tags=chunk)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                if len(chunk) == 1:
                    _LOG.warning("Tag %s is refused by MLflow: %s", chunk[0].key, error)
                    continue
                for item in chunk:
                    self.set_tags({item.key: item.value})

    def log_files(self, paths: Iterable[Path]) -> None:
        """Copy files into the run's artifacts."""
        for path in paths:
            self._client.log_artifact(self.run_id, str(path))

    def end(self, status: str, ended_ms: int | None) -> None:
        """Close the run as FINISHED, FAILED or KILLED; without a time it ends now."""
        self._client.set_terminated(self.run_id, status=status, end_time=ended_ms)


def make_database(uri: str) -> None:
    """Make the SQLite file of a URI, with its tables, where it is not there yet; it is there whole or not at all.

    MLflow would make it in place: killed meanwhile it leaves a file that nothing can open, and two runs that begin at
    the same time make the same tables twice.
    """
    path = database_path(uri)
    if path is None or path.exists():
        return
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments()
        try:
            os.link(made, path)
        except FileExistsError:
            pass  # another run was faster
        except OSError:  # a file system without hard links
            made.replace(path)


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    try:
        return str(client.create_experiment(name, artifact_location=artifact_location(uri, name)))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        # Another run has created it in the meantime.
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def _text(value: Any, limit: int) -> str:
    text = value if isinstance(value, str) else "null" if value is None else str(value)
    if len(text) <= limit:
        return text
    note = f"... [{len(text)} characters, all of them in config.yaml]"
    return text[: limit - len(note)] + note


def _chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
