"""A run's folder: which one a command gets, what lies where in it, and one writer at a time.

`check_run_directory` reports every reason why a command could not have its folder, before anything starts and without
leaving a trace; `open_run` takes the folder, its lock, and writes what was asked and decided. Which configurations
are the same run is decided in `identity.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.schema import RunConfig
from orchestrator.config.urls import is_url
from orchestrator.errors import ConfigError, Problem
from orchestrator.plan.run_plan import RunPlan
from orchestrator.tracking import attempts as attempts_file
from orchestrator.tracking.identity import (
    changes_between,
    checkpoint_directory,
    default_name,
    problems_of_asked_name,
    problems_of_name,
    starts_elsewhere,
)
from orchestrator.tracking.lock import LOCK_NAME, RunLock, problem_of_lock
from orchestrator.tracking.metrics_log import MetricsLog, read_records

HISTORY_NAME = "history.jsonl"
_UNRECORDED = ("run.", "tracking.", "cluster.", "fault_tolerance.")
"""Changes of these sections change nothing of the run itself and are not listed when it goes on."""


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file: a reader sees the old text or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


@dataclass(slots=True)
class RunDirectory:
    """A run's folder, held by this process. Paths are absolute."""

    path: Path
    continues: bool
    """Whether an unfinished run goes on."""
    changes: dict[str, tuple[Any, Any]]
    """Dotted key -> (before, now) of what changed since the run was last started; empty for a new run."""
    checkpoints: str
    """Path or URL of the folder of its checkpoints."""
    _lock: RunLock = field(repr=False)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of everything that does not belong on the console."""
        return self.path / "logs"

    @property
    def summary(self) -> Path:
        """How it ended."""
        return self.path / "summary.json"

    def record_attempts(self, attempts: Iterable[attempts_file.Attempt]) -> None:
        """Hand over the attempts of this command, once, when it ends."""
        attempts_file.append_attempts(self.path, [attempt.to_dict() for attempt in attempts])
        _append_history(self.path, {"event": "end"})

    def attempts(self) -> list[dict[str, Any]]:
        """All attempts handed over, over all commands of the run."""
        return attempts_file.read_attempts(self.path)

    def write_json(self, name: str, values: Any) -> Path:
        """Write a JSON file (`placement.json`, `summary.json`) into the folder, atomically."""
        path = self.path / name
        write_atomically(path, json.dumps(values, indent=2) + "\n")
        return path

    def close(self) -> None:
        """Release the lock. The process's end does it too."""
        self._lock.release()


@dataclass(frozen=True, slots=True)
class _Choice:
    path: Path
    base_name: str
    continues: bool
    before: dict[str, Any] | None
    """Configuration that the continued run was last started with."""
    problems: tuple[Problem, ...] = ()


def check_run_directory(config: RunConfig) -> tuple[Problem, ...]:
    """Every reason why a command with this configuration could not have its run's folder now. Leaves no trace."""
    problems = [
        *_problems_of_folder("run.directory", config.run.directory),
        *(
            _problems_of_folder("checkpoint.directory", config.checkpoint.directory)
            if config.checkpoint.directory is not None and not is_url(config.checkpoint.directory)
            else ()
        ),
        *problems_of_asked_name(config),
    ]
    if not any(problem.key.startswith("run.") for problem in problems):
        choice = _choose(config)
        problems.extend(choice.problems)
        if choice.continues and (held := problem_of_lock(choice.path)) is not None:
            problems.append(held)
    return tuple(problems)


def upcoming_run(config: RunConfig) -> tuple[Path, bool]:
    """(folder, whether an unfinished run goes on) of a command with this configuration, as things stand now."""
    choice = _choose(config)
    return choice.path, choice.continues


def open_run(config: RunConfig, plan: RunPlan) -> RunDirectory:
    """Take the run's folder: lock it, write `config.yaml` and `plan.json`, put an earlier summary aside.

    Raises:
        ConfigError: the folder cannot be had; all reasons together.
    """
    problems = check_run_directory(config)
    if problems:
        raise ConfigError(problems)
    while True:
        choice = _choose(config)
        if choice.problems:
            raise ConfigError(choice.problems)
        (choice.path / "logs").mkdir(parents=True, exist_ok=True)
        lock = RunLock(choice.path)
        try:
            # Another command may have begun, or even finished, this very run before the lock was ours.
            if _choose(config) == choice:
                return _take(config, plan, choice, lock)
        except BaseException:
            lock.release()
            raise
        lock.release()


def _take(config: RunConfig, plan: RunPlan, choice: _Choice, lock: RunLock) -> RunDirectory:
    now = config.to_dict()
    changes: dict[str, tuple[Any, Any]] = {}
    if choice.before is not None:
        changes = {
            key: pair for key, pair in changes_between(choice.before, now).items() if not key.startswith(_UNRECORDED)
        }
    if choice.continues:
        _recover_attempts(choice.path)
        summary = choice.path / "summary.json"
        if summary.exists():
            summary.replace(choice.path / "summary.previous.json")
    world_size = plan.parallel.world_size if plan.parallel is not None else 0
    event = {
        "event": "continue" if choice.continues else "create",
        "name": choice.path.name,
        "base_name": choice.base_name,
        "world_size": world_size,
        "changes": {key: list(pair) for key, pair in changes.items()},
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    _append_history(choice.path, event)
    write_atomically(choice.path / "config.yaml", yaml.safe_dump(now, sort_keys=False, allow_unicode=True))
    write_atomically(choice.path / "plan.json", json.dumps(plan.to_dict(), indent=2) + "\n")
    return RunDirectory(choice.path, choice.continues, changes, checkpoint_directory(config, choice.path), lock)


def _append_history(folder: Path, event: dict[str, Any]) -> None:
    log = MetricsLog(folder / HISTORY_NAME)
    log.append({**event, "time": time.time()})
    log.close()


def _recover_attempts(folder: Path) -> None:
    """A command that was killed handed no attempts over: read them from what it recorded."""
    try:
        history = read_records(folder / HISTORY_NAME)
        if not history or history[-1]["event"] == "end":
            return
        last = history[-1]
        found = attempts_file.attempts_from_metrics(
            folder, since=last["time"], world_size=last["world_size"], cause="command killed"
        )
    except (ValueError, KeyError) as error:
        problem = f"The record of the unfinished run in {folder} is damaged: {error}."
        raise ConfigError(
            Problem("run.name", problem, "Mend the file, or begin a new run with checkpoint.resume=never.")
        ) from error
    attempts_file.append_attempts(folder, found)


def _choose(config: RunConfig) -> _Choice:
    """The folder that a command gets: new, numbered or continued."""
    base = Path(config.run.directory).expanduser().absolute()
    name = config.run.name or default_name(config)
    taken, runs = _numbered(base, name)
    path = base / (name if 1 not in taken else f"{name}-{max(taken) + 1}")
    new = _Choice(path, name, continues=False, before=None)
    if not runs:
        return new
    latest = runs[-1]
    before = _configuration_of(latest)
    if isinstance(before, Problem):
        return _Choice(latest, name, continues=False, before=None, problems=(before,))
    now = config.to_dict()
    elsewhere = starts_elsewhere(now) and before["checkpoint"].get("resume") != config.checkpoint.resume
    continues = not (config.checkpoint.resume == "never" or elsewhere or status_of(latest) == "finished")
    problems = problems_of_name(latest.name, before, now, continues=continues)
    if continues or problems:
        return _Choice(latest, name, continues, before, problems)
    return new


def _numbered(base: Path, name: str) -> tuple[set[int], list[Path]]:
    """(numbers taken, the runs of this name in order): `name` is number 1, then come `name-2`, `name-3`."""
    # Few digits, so that a hash of digits alone is not read as a number.
    pattern = re.compile(re.escape(name) + r"(?:-([1-9]\d{0,4}))?")
    found = []
    for entry in base.iterdir() if base.is_dir() else ():
        match = pattern.fullmatch(entry.name)
        if match and match.group(1) != "1" and not _is_bare(entry):
            found.append((int(match.group(1) or 1), entry))
    found.sort()
    runs = [path for number, path in found if number == 1 or _base_name_of(path) == name]
    return {number for number, _ in found}, runs


def _is_bare(folder: Path) -> bool:
    """Whether a folder is free to be taken: empty, or left by a command killed before it wrote anything."""
    try:
        return all(entry.name in (LOCK_NAME, "logs") for entry in folder.iterdir())
    except OSError:
        return False


def _base_name_of(folder: Path) -> str | None:
    try:
        history = read_records(folder / HISTORY_NAME)
    except (OSError, ValueError):
        return None
    return history[0].get("base_name") if history else None


def _configuration_of(folder: Path) -> dict[str, Any] | Problem:
    path = folder / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        values = None
    if isinstance(values, dict) and isinstance(values.get("checkpoint"), dict):
        return values
    return Problem(
        "run.name",
        f"{folder} exists and is not the folder of a run: it has no readable config.yaml.",
        "Give another run.name or run.directory, or move it away.",
    )


def status_of(folder: Path) -> str | None:
    """How the run in a folder ended; None: it has not, or is none."""
    try:
        return str(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _problems_of_folder(key: str, asked: str) -> list[Problem]:
    """Whether folders can be made below a path, tried out in its nearest existing parent."""
    folder = Path(asked).expanduser().absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir():
        why = f"{nearest} is a file, not a folder"
    else:
        try:
            with tempfile.TemporaryDirectory(prefix=".probe-", dir=nearest):
                return []
        except OSError:  # its own words may mislead: of /proc "no such file or directory"
            why = f"nothing can be made in {nearest}"
    return [Problem(key, f"{key}={asked} cannot be used: {why}.", "Give a folder that can be written.")]
