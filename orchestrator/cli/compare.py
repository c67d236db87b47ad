"""`compare`: runs side by side from MLflow: plan, loss, pace, memory, predicted beside measured, and which was best.

What is found is put together in `tracking/comparison.py`; tables are made in `compare_table.py`, the page in
`compare_page.py`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.show import page_console
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import ConfigError, Problem, RunError
from orchestrator.tracking.comparison import RunRecord, compare
from orchestrator.tracking.destination import check_uri, database_path, resolve_uri, shown
from orchestrator.tracking.ledger import read_ledger
from orchestrator.tracking.mlflow_environment import set_up_environment

if TYPE_CHECKING:
    from orchestrator.tracking.mlflow_read import Store

HELP = """\
python -m orchestrator compare [RUN ...] [--last N] [--json] [--html FILE] [tracking.uri=URI] [tracking.experiment=NAME]

Puts runs side by side from their MLflow record: the plan that each ran under, loss, tokens a second, MFU and memory,
each beside what was predicted, and the settings in which they differ. Runs that learn the same stand together: among
them it names the fastest, the cheapest and the leanest, and how far apart their losses ended. A run that went on under
another plan is not ranked: what was measured is of both.
A RUN is a name, a pattern of names ('llama7b_*'), an MLflow run id or its beginning, or a run's folder. Without any:
the newest 20 of the store, or as many as --last says. The store is tracking.uri, else MLFLOW_TRACKING_URI, else
mlflow.db in the current folder.
Exit code 0; 2: no such run or store; 3: the store does not answer.

  python -m orchestrator compare
  python -m orchestrator compare quickstart-1a2b3c4d 'quickstart-*-2' --html comparison.html
  python -m orchestrator compare --last 5 --json tracking.uri=http://localhost:5000
"""

FLAGS = ("--json", "--last", "--html")
_LAST = 20
_SETTINGS = ("tracking.uri", "tracking.experiment")


@dataclass(slots=True)
class _Asked:
    """What the words of the command line mean."""

    names: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    last: int = _LAST
    page: Path | None = None


def run(invocation: Invocation) -> int:
    """Print the comparison. Raises ConfigError for what is not there, RunError when the store does not answer."""
    asked = _asked(invocation)
    uri = resolve_uri(asked.settings.get("tracking.uri"), os.environ, Path.cwd())
    _refuse_missing(uri, asked)
    set_up_environment()
    from orchestrator.tracking.mlflow_read import Store, StoreError

    try:
        store = Store(uri, asked.settings.get("tracking.experiment"))
        records = _records(store, asked, uri)
        curves = {} if asked.page is None else {record.run_id: store.losses(record.run_id) for record in records}
    except StoreError as error:
        fix = "Start the server or give tracking.uri=URI; a database of an older MLflow: `mlflow db upgrade URI`."
        raise RunError(Problem("", f"The tracking store {shown(uri)} does not answer: {error}", fix)) from error
    found = compare(records)
    if asked.page is not None:
        from orchestrator.cli.compare_page import page

        _write(asked.page, page(found, curves, shown(uri)))
    if invocation.json:
        json.dump(found.to_dict(), sys.stdout, indent=2, allow_nan=False, default=str)
        sys.stdout.write("\n")
    else:
        from orchestrator.cli.compare_table import render_comparison

        render_comparison(found, page_console())
        if asked.page is not None:
            print(f"\npage: {asked.page.absolute()}")
    return 0


def _asked(invocation: Invocation) -> _Asked:
    asked = _Asked()
    problems = list(invocation.problems)
    for word in invocation.overrides:
        key, equals, value = word.partition("=")
        if key in _SETTINGS and equals and value:
            asked.settings[key] = value
        elif equals or word.startswith(("+", "~")):
            fix = f"Name runs; only {' and '.join(f'{known}=VALUE' for known in _SETTINGS)} can be set here."
            problems.append(Problem(key, f"`compare` does not use {word}.", fix))
        else:
            asked.names.append(word)
    last = invocation.options.get("--last")
    if last is not None and not (last.isdecimal() and 0 < int(last) <= 1000):
        problems.append(Problem("--last", f"{last!r} is no number of runs.", "Give a number from 1 to 1000."))
    elif last is not None and asked.names:
        fix = "Leave out --last, or the names."
        problems.append(Problem("--last", "Runs are named as well, and all of those are compared.", fix))
    elif last is not None:
        asked.last = int(last)
    if (page := invocation.options.get("--html")) is not None:
        asked.page = Path(page).expanduser()
        if asked.page.is_dir() or not asked.page.absolute().parent.is_dir():
            wrong = "is a folder" if asked.page.is_dir() else "lies in a folder that does not exist"
            problems.append(Problem("--html", f"{page} {wrong}.", "Give the path of a file in an existing folder."))
    if problems:
        raise ConfigError(problems)
    return asked


def _refuse_missing(uri: str, asked: _Asked) -> None:
    """MLflow would make a database that is not there."""
    if problems := check_uri(uri, "tracking.uri" if "tracking.uri" in asked.settings else "MLFLOW_TRACKING_URI"):
        raise ConfigError(problems)
    database = database_path(uri)
    if database is not None and not database.is_file():
        fix = "Run this in the folder where the runs were started, or give tracking.uri=sqlite:///PATH."
        raise ConfigError(Problem("tracking.uri", f"There is no record of runs: {database} does not exist.", fix))


def _records(store: Store, asked: _Asked, uri: str) -> list[RunRecord]:
    experiment = asked.settings.get("tracking.experiment")
    if experiment is not None and experiment not in store.experiments:
        hint = did_you_mean(nearest(experiment, store.experiments))
        fix = f"{hint} The experiments are {', '.join(sorted(store.experiments))}.".strip()
        raise ConfigError(Problem("tracking.experiment", f"{shown(uri)} has no experiment {experiment!r}.", fix))
    if not asked.names:
        found = store.newest(asked.last)
        if not found:
            fix = "Train something first (`python -m orchestrator`), or give another tracking.uri."
            raise ConfigError(Problem("", f"{shown(uri)} holds no run of this program.", fix))
        return found
    records: dict[str, RunRecord] = {}
    problems = []
    for word in asked.names:
        matching = store.matching(_run_id_of_folder(word, uri) or word)
        records |= {record.run_id: record for record in matching}
        if not matching:
            hint = did_you_mean(nearest(word, store.names()))
            fix = f"{hint} Name a run, a pattern, an MLflow run id or a run's folder.".strip()
            problems.append(Problem(word, f"{shown(uri)} has no run {word!r}.", fix))
    if problems:
        raise ConfigError(problems)
    return list(records.values())


def _run_id_of_folder(word: str, uri: str) -> str | None:
    """The MLflow run that a run's folder names. Raises ConfigError where that is in another store."""
    ledger = read_ledger(Path(word).expanduser())
    if ledger is None or ledger.run_id is None:
        return None
    if ledger.uri != uri:
        fix = f"Add tracking.uri={shown(ledger.uri)}."
        raise ConfigError(Problem(word, f"Its record is in {shown(ledger.uri)}, not in {shown(uri)}.", fix))
    return ledger.run_id


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except PermissionError as error:
        fix = "Give the path of a file that this user may write."
        raise RunError(Problem("--html", f"{path} may not be written by this user.", fix)) from error
