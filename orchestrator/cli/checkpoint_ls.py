"""`checkpoint ls`: what lies in a run's folder of checkpoints, and which of it the run would go on from."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from orchestrator.checkpoint.find import Found, Listed, list_checkpoints, look_at, newest_of
from orchestrator.checkpoint.storage import StorageError
from orchestrator.cli.checkpoint_words import as_json, places, plan_words, size_words
from orchestrator.cli.invocation import Invocation
from orchestrator.cli.progress import span
from orchestrator.errors import Problem, RunError
from orchestrator.tracking.run_directory import status_of

SUMMARY = "steps, state, size, plan, loss and age of checkpoints, and which one a run would go on from"

HELP = """\
checkpoint ls [RUN | FOLDER | CHECKPOINT | s3://BUCKET/PREFIX ...] [run.directory=FOLDER] [--json]

Lists checkpoints: complete, damaged (a file that its manifest names is missing or has another size; `verify` reads the
bytes too) or left over from a save that was killed, which the next start of the run removes. Without a name: of every
run in run.directory. The one marked with * is where the run would go on; a finished run does not, its command begins
another, and `resume` in the JSON is null. Exit code 0; 2: there is nothing of that name.

  python -m orchestrator checkpoint ls
  python -m orchestrator checkpoint ls quickstart-1a2b3c4d --json
"""

FLAGS = ("--json",)


def run(invocation: Invocation, words: Sequence[str]) -> int:
    """Print the lists. Raises ConfigError for a name that means nothing, RunError when a store does not answer."""
    found = places(words, "ls")
    try:
        lists = [(place, _entries(place)) for _, place in found]
    except StorageError as error:
        raise RunError(Problem("", f"{error.message}.", error.fix)) from error
    if invocation.json:
        print(json.dumps({"directories": [_as_json(place, entries) for place, entries in lists]}, indent=2))
        return 0
    if not lists:
        print("no runs here")
    for place, entries in lists:
        print("\n".join(_lines(place, entries)))
    return 0


def _entries(place: Found) -> list[Listed]:
    return [look_at(place.folder)] if place.is_checkpoint else list_checkpoints(place.folder)


def _as_json(place: Found, entries: Sequence[Listed]) -> dict[str, object]:
    newest = None if place.is_checkpoint or _is_finished(place) else newest_of(entries)
    return {
        "directory": str(place.folder.parent() if place.is_checkpoint else place.folder),
        "resume": None if newest is None else str(newest.folder),
        "checkpoints": [as_json(entry) for entry in entries],
    }


def _is_finished(place: Found) -> bool:
    """Whether the run whose checkpoints these are has done all its steps; not known of a store without its run."""
    return place.run is not None and status_of(place.run) == "finished"


def _lines(place: Found, entries: Sequence[Listed]) -> list[str]:
    newest = None if place.is_checkpoint else newest_of(entries)
    finished = _is_finished(place)
    lines = [str(place.folder)]
    if not entries:
        return [*lines, "  no checkpoints"]
    rows: list[tuple[str, ...]] = [("", "step", "state", "size", "plan", "loss", "validation", "age")]
    rows += [_row(entry, entry is newest and not finished) for entry in entries]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row, entry in zip(rows, (None, *entries), strict=True):
        cells = (f"{cell:>{width}}" if column in _NUMBERS else f"{cell:<{width}}" for column, (cell, width) in
                 enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join(cells).rstrip())
        if entry is not None:
            lines += [f"      {fault}" for fault in entry.faults]
    if place.is_checkpoint:
        return lines
    if finished:
        lines.append("the run has finished: its command begins another")
        if newest is not None:
            lines.append(f"to go on from step {newest.step} with more steps: checkpoint.resume={newest.folder}")
        return lines
    lines.append("a run would begin anew" if newest is None else f"a run would go on from step {newest.step}")
    return lines


_NUMBERS = (1, 3, 5, 6, 7)


def _row(entry: Listed, newest: bool) -> tuple[str, ...]:
    manifest = entry.manifest
    return (
        "*" if newest else " ",
        str(entry.step) if entry.step is not None else entry.folder.name,
        entry.state,
        size_words(entry.size_bytes),
        plan_words(manifest.parallel) if manifest is not None else "",
        _loss(None if manifest is None else manifest.loss),
        _loss(None if manifest is None else manifest.validation_loss),
        span(max(0.0, time.time() - entry.saved_at)),
    )


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
