"""What `checkpoint ls` and `checkpoint verify` take and how they say it: the words of a command line, sizes, plans.

The words are checked here and looked up by `checkpoint/find.py`. Nothing is printed here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.find import Found, Listed, find
from orchestrator.checkpoint.storage import StorageError
from orchestrator.config.schema import RunConfig
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import ConfigError, Problem

_RUN_DIRECTORY = "run.directory="


def places(words: Sequence[str], command: str) -> list[tuple[str, Found]]:
    """(word, what it means) for every word; without any, for each run of `run.directory` that has checkpoints.

    Raises ConfigError when a word means nothing, or is a setting that says nothing here.
    """
    directory = RunConfig.model_fields["run"].default.directory
    asked, problems = [], []
    for word in words:
        if word.startswith(_RUN_DIRECTORY):
            directory = word.removeprefix(_RUN_DIRECTORY)
        elif "=" in word and not Path(word).exists():
            fix = "Name a run, a folder, a checkpoint or a URL; only run.directory=FOLDER can be set here."
            problems.append(Problem(word.partition("=")[0], f"`checkpoint {command}` does not use {word}.", fix))
        else:
            asked.append(word)
    found = []
    for word in asked or _runs_with_checkpoints(directory):
        try:
            place = find(word, directory)
        except StorageError as error:
            problems.append(Problem(word, f"{error.message}.", error.fix))
            continue
        if place is None:
            problems.append(_not_there(word, directory))
        else:
            found.append((word, place))
    if problems:
        raise ConfigError(problems)
    return found


def _runs_with_checkpoints(directory: str) -> list[str]:
    base = Path(directory).expanduser()
    return sorted(entry.parent.name for entry in base.glob("*/config.yaml")) if base.is_dir() else []


def _not_there(word: str, directory: str) -> Problem:
    runs = [entry.name for entry in Path(directory).expanduser().glob("*") if entry.is_dir()]
    hint = did_you_mean(nearest(word, runs))
    fix = "Name a run, its folder, a folder of checkpoints, a checkpoint, or s3://BUCKET/PREFIX."
    return Problem(
        word, f"There is no run {word!r} in {directory}, and no folder or prefix {word}.", f"{hint} {fix}".strip()
    )


def as_json(entry: Listed) -> dict[str, Any]:
    """An entry for machines; what its manifest would say is null where it cannot be read."""
    manifest = entry.manifest
    return {
        "path": str(entry.folder),
        "step": entry.step,
        "state": entry.state,
        "faults": list(entry.faults),
        "size_bytes": entry.size_bytes,
        "saved_at": entry.saved_at,
        "age_seconds": max(0.0, time.time() - entry.saved_at),
        "tokens": manifest and manifest.tokens,
        "loss": manifest and manifest.loss,
        "validation_loss": manifest and manifest.validation_loss,
        "parallel": manifest and dict(manifest.parallel),
        "versions": manifest and dict(manifest.versions),
    }


def plan_words(parallel: Mapping[str, Any]) -> str:
    """The plan that wrote a checkpoint, in a few words: `data 4 · tensor 2 · ZeRO 3`."""
    axes = [
        f"{axis} {parallel[axis]}" for axis in ("data", "tensor", "pipeline", "context") if parallel.get(axis, 1) > 1
    ]
    if parallel.get("zero_stage"):
        axes.append(f"ZeRO {parallel['zero_stage']}")
    return " · ".join(axes) or "one process"


def size_words(size_bytes: float) -> str:
    """A size as a person says it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
