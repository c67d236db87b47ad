"""Where the MLflow record goes: the tracking URI as meant, checked before anything starts. Pure, without MLflow.

Order of precedence: `tracking.uri`, `MLFLOW_TRACKING_URI`, a SQLite file `mlflow.db` in the current folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem

DATABASE_FILE = "mlflow.db"
_SQLITE = "sqlite:///"
_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks", "uc")


def resolve_uri(asked: str | None, environment: Mapping[str, str], current_folder: Path) -> str:
    """The tracking URI that a command means; a relative SQLite path becomes absolute, so that it can be used anywhere.

    Args:
        asked: `tracking.uri`.
        environment: of the command, for `MLFLOW_TRACKING_URI`.
        current_folder: of the command; absolute.
    """
    uri = asked or environment.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{DATABASE_FILE}"
    if uri.startswith(_SQLITE) and not uri.startswith(f"{_SQLITE}/"):
        return f"{_SQLITE}{current_folder / uri.removeprefix(_SQLITE)}"
    return uri


def database_path(uri: str) -> Path | None:
    """File of an absolute SQLite URI, or None for any other store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(f"{_SQLITE}/") else None


def artifact_location(uri: str, experiment: str) -> str | None:
    """Where the files of a new experiment go: beside the SQLite file; None lets the server decide."""
    database = database_path(uri)
    if database is None:
        return None
    return (database.parent / "mlruns" / re.sub(r"[^\w.-]", "_", experiment)).as_uri()


def shown(uri: str) -> str:
    """The URI without a password."""
    return re.sub(r"(://[^/:@]*):[^/@]*@", r"\1:***@", uri)


def how_to_look(uri: str) -> str:
    """What to open or type to see the record."""
    if uri.startswith(("http://", "https://")):
        return shown(uri)
    return f"mlflow ui --backend-store-uri {shown(uri)}"


def check_uri(uri: str, named: str) -> tuple[Problem, ...]:
    """Why a URI can be no tracking store; `named` is what gave it."""
    if urlsplit(uri).scheme.split("+")[0] in _SCHEMES:
        return ()
    return (
        Problem(
            "tracking.uri",
            f"{named}={shown(uri)} is not a store that MLflow writes to: it has no database or server scheme.",
            f"Use one of {', '.join(f'{known}://' for known in _SCHEMES)}, for example {_SQLITE}{DATABASE_FILE}.",
        ),
    )


def check_tracking(config: RunConfig, environment: Mapping[str, str], current_folder: Path) -> tuple[Problem, ...]:
    """Why the record could never be written where it is asked to go. A server that is down is no reason."""
    uri = resolve_uri(config.tracking.uri, environment, current_folder)
    named = "tracking.uri" if config.tracking.uri else "MLFLOW_TRACKING_URI"
    if problems := check_uri(uri, named):
        return problems
    database = database_path(uri)
    made_by_the_run = database is not None and database.parent == Path(config.run.directory).expanduser()
    if database is not None and not database.parent.is_dir() and not made_by_the_run:
        return (
            Problem(
                "tracking.uri",
                f"{named}={uri}: the folder {database.parent} of the database does not exist.",
                "Make the folder, or give the path of a file in an existing one.",
            ),
        )
    return ()
