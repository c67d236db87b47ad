"""`tracking.json`: the MLflow run of a run's folder and how far its record has been sent. Pure but for the file.

One process writes at a time: the command before it starts the forwarder, the forwarder from then on.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from orchestrator.tracking.run_directory import write_atomically
from orchestrator.tracking.tail import Sent

LEDGER_NAME = "tracking.json"


def _new_token() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is known of the MLflow run. All of it belongs to `uri`."""

    uri: str
    run_id: str | None = None
    last_step: int = 0
    last_validation_step: int = 0
    token: str = field(default_factory=_new_token)
    """Tag by which a run is found again whose creation was not noted down in time."""
    complete: bool = False
    """Whether everything, the end included, has been sent."""
    error: str | None = None
    """Why the last try failed; None after a success."""

    @property
    def sent(self) -> Sent:
        """How far the record has been sent."""
        return Sent(self.last_step, self.last_validation_step)

    def with_sent(self, sent: Sent) -> Ledger:
        """The ledger after more was sent."""
        return replace(self, last_step=sent.step, last_validation_step=sent.validation_step, error=None)


def read_ledger(folder: Path) -> Ledger | None:
    """The ledger of a run's folder, or None if there is none that can be read."""
    try:
        values = json.loads((folder / LEDGER_NAME).read_text(encoding="utf-8"))
        known = {item.name for item in fields(Ledger)}
        return Ledger(**{key: value for key, value in values.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_ledger(folder: Path, ledger: Ledger) -> None:
    """Note it down, atomically."""
    write_atomically(folder / LEDGER_NAME, json.dumps(asdict(ledger), indent=1) + "\n")


def open_ledger(folder: Path, uri: str) -> Ledger:
    """The ledger to go on with at a URI: the noted one, or a new one where nothing was sent to that URI yet."""
    noted = read_ledger(folder)
    ledger = noted if noted is not None and noted.uri == uri else Ledger(uri)
    return replace(ledger, complete=False, error=None)
