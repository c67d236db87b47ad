"""Where the MLflow record goes: the tracking URI as meant, checked before anything starts. Without MLflow.

All of it is pure but for the checks of a SQLite file, which look at the disk and leave no trace.

Order of precedence: `tracking.uri`, `MLFLOW_TRACKING_URI`, a SQLite file `mlflow.db` in the current folder.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem

DATABASE_FILE = "mlflow.db"
_SQLITE = "sqlite:///"
_SQLITE_HEADER = b"SQLite format 3\0"
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
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]) if uri.startswith(f"{_SQLITE}/") else None


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
    return f"mlflow ui --backend-store-uri {shlex.quote(shown(uri))}"


def check_uri(uri: str, named: str) -> tuple[Problem, ...]:
    """Why a URI can be no tracking store; `named` is what gave it."""
    scheme, _, rest = uri.partition("://")
    if urlsplit(uri).scheme.split("+")[0] not in _SCHEMES:
        why = "it has no database or server scheme"
        fix = f"Use one of {', '.join(f'{known}://' for known in _SCHEMES)}, for example {_SQLITE}{DATABASE_FILE}."
    elif scheme == "sqlite" and not rest.strip("/").partition("?")[0]:
        why, fix = "it names no file", f"Give one: {_SQLITE}{DATABASE_FILE}."
    elif uri.startswith("sqlite:") and not uri.startswith(_SQLITE):
        why, fix = "three slashes come before the path", f"Write {_SQLITE}{uri.removeprefix('sqlite:').lstrip('/')}."
    elif scheme in ("http", "https") and not _is_address(uri):
        why, fix = "it names no server", "Write http://HOST:PORT."
    else:
        return ()
    return (Problem("tracking.uri", f"{named}={shown(uri)} is not a store that MLflow writes to: {why}.", fix),)


def _is_address(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or none there can be
        return False


def check_store(uri: str, named: str | None, *, made_later: Path | None = None) -> tuple[Problem, ...]:
    """Why nothing could ever be written to a tracking URI. A server that is down is no reason.

    Args:
        uri: as `resolve_uri` gives it.
        named: what gave it; None: nothing did, it is the default.
        made_later: a folder that will be there by then.
    """
    if problems := check_uri(uri, named or ""):
        return problems
    database = database_path(uri)
    if database is None or (database.parent == made_later and not made_later.exists()):
        return ()
    why = _why_no_database(database)
    fix = "Give the path of a file, new or one of MLflow's, in an existing folder that can be written."
    said = f"{named}={uri}" if named else f"The default store {uri}"
    return (Problem("tracking.uri", f"{said} cannot be used: {why}.", fix),) if why else ()


def _why_no_database(path: Path) -> str:
    """Why SQLite could not open a file for writing, or make it; empty if it could."""
    folder = path.parent
    if not folder.is_dir():
        return f"{folder} is a file, not a folder" if folder.exists() else f"the folder {folder} does not exist"
    if path.is_dir():
        return f"{path} is a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=folder):  # its journal lies beside it
            pass
    except OSError:
        return f"nothing can be made in {folder}"
    if not path.exists():
        return ""
    if not os.access(path, os.R_OK | os.W_OK):
        return f"{path} cannot be read and written"
    if not path.is_file():
        return f"{path} is no file"
    with path.open("rb") as stream:
        start = stream.read(len(_SQLITE_HEADER))
    return "" if start in (b"", _SQLITE_HEADER) else f"{path} is not a SQLite database"


def check_tracking(config: RunConfig, environment: Mapping[str, str], current_folder: Path) -> tuple[Problem, ...]:
    """Why the record could never be written where it is asked to go. A server that is down is no reason."""
    uri = resolve_uri(config.tracking.uri, environment, current_folder)
    variable = "MLFLOW_TRACKING_URI"
    named = "tracking.uri" if config.tracking.uri else variable if environment.get(variable) else None
    return check_store(uri, named, made_later=Path(config.run.directory).expanduser())
