"""`checkpoint verify`: reads every byte of checkpoints and compares it with their manifests."""

from __future__ import annotations

import json
from collections.abc import Sequence

from orchestrator.checkpoint.find import Found, Listed, list_checkpoints, look_at
from orchestrator.checkpoint.storage import StorageError
from orchestrator.cli.checkpoint_words import as_json, places, size_words
from orchestrator.cli.invocation import Invocation
from orchestrator.errors import ConfigError, Problem, RunError

SUMMARY = "read every byte of checkpoints and name each file that is missing, cut or changed"

HELP = """\
checkpoint verify RUN | FOLDER | CHECKPOINT | s3://BUCKET/PREFIX ... [run.directory=FOLDER] [--json]

Reads every file of every checkpoint there and compares sizes and checksums with the manifest that was written with it.
Changes nothing. Exit code 0: all are complete; 3: at least one is damaged; 2: there is no checkpoint of that name.

  python -m orchestrator checkpoint verify quickstart-1a2b3c4d
  python -m orchestrator checkpoint verify runs/mine/checkpoints/step-00000200
"""

FLAGS = ("--json",)

_DAMAGED = 3


def run(invocation: Invocation, words: Sequence[str]) -> int:
    """Print what was found. Raises ConfigError for a name without checkpoints, RunError when a store is not there."""
    if all(word.startswith("run.directory=") for word in words):
        fix = "Name a run, its folder, a checkpoint, or s3://BUCKET/PREFIX; `checkpoint ls` lists them."
        raise ConfigError(Problem("checkpoint verify", "It was not said which checkpoints.", fix))
    found = places(words, "verify")
    try:
        entries = [entry for _, place in found for entry in _entries(place)]
    except StorageError as error:
        raise RunError(Problem("", f"{error.message}.", error.fix)) from error
    if not entries:
        shown = ", ".join(str(place.folder) for _, place in found)
        raise ConfigError(
            Problem(words[0], f"There is no checkpoint in {shown}.", "`checkpoint ls` lists what is there.")
        )
    damaged = [entry for entry in entries if entry.faults]
    if invocation.json:
        print(json.dumps({"complete": not damaged, "checkpoints": [as_json(entry) for entry in entries]}, indent=2))
    else:
        for entry in entries:
            print("\n".join(_lines(entry)))
    return _DAMAGED if damaged else 0


def _entries(place: Found) -> list[Listed]:
    if place.is_checkpoint:
        return [look_at(place.folder, read_bytes=True)]
    return [
        entry for entry in list_checkpoints(place.folder, read_bytes=True) if entry.state in ("complete", "damaged")
    ]


def _lines(entry: Listed) -> list[str]:
    if entry.faults:
        return [f"damaged   {entry.folder}", *(f"          {fault}" for fault in entry.faults)]
    assert entry.manifest is not None
    files, kind = len(entry.manifest.files), entry.manifest.checksum
    return [f"complete  {entry.folder}  ({files} files, {size_words(entry.size_bytes)}, {kind})"]
