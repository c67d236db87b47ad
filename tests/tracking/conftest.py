"""A real MLflow store for each test, made once and copied: creating its tables takes seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tracking.runs import create_database


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with MLflow's tables and nothing in them; copy it, never write to it."""
    return create_database(tmp_path_factory.mktemp("store") / "empty.db")


@pytest.fixture
def uri(tmp_path: Path, empty_database: Path) -> str:
    """Tracking URI of a store of this test's own."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests decide where records go, whatever the shell says."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
