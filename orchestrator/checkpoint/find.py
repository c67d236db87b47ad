"""Which checkpoints a word means: a run's name or folder, a folder of checkpoints, one checkpoint, or a URL. No torch.

Reads names, `config.yaml` and manifests only. What is in a folder, and which of it a run would go on from, is told by
`list_checkpoints`; nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.checkpoint.folder import committed_folders, faults_of_folder, leftovers
from orchestrator.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, step_of
from orchestrator.checkpoint.storage import Folder, LocalFolder, open_folder
from orchestrator.config.urls import is_url


@dataclass(frozen=True, slots=True)
class Found:
    """What a word means: one checkpoint, or a folder of checkpoints."""

    folder: Folder
    is_checkpoint: bool
    """Whether it is one checkpoint, whole or damaged."""
    run: Path | None = None
    """Folder of the run that a folder of checkpoints belongs to, where that is known."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of a folder of checkpoints."""

    folder: Folder
    state: str
    """`complete`, `damaged`, `unfinished save`, `damaged, set aside` or `being deleted`."""
    faults: tuple[str, ...]
    size_bytes: int
    """Of its files as they are there."""
    manifest: Manifest | None
    """None where it cannot be read."""

    @property
    def step(self) -> int | None:
        """As its manifest or its name says."""
        if self.manifest is not None:
            return self.manifest.step
        named = re.search(r"step-\d{8,}", str(self.folder))
        return None if named is None else step_of(named.group())

    @property
    def saved_at(self) -> float:
        """`time.time()` when its state was copied; of its newest file where that is not known."""
        known = None if self.manifest is None else self.manifest.saved_at
        return self.folder.modified() if known is None else known


def find(word: str, run_directory: str) -> Found | None:
    """What is called `word`; None: nothing is.

    Args:
        word: a path, a URL, or the name of a run.
        run_directory: where runs of a name are looked for (`run.directory`).

    Raises:
        StorageError: an object store does not answer or its URL is wrong.
    """
    if is_url(word):
        return _at(open_folder(word.rstrip("/")))
    for path in (Path(word).expanduser(), Path(run_directory).expanduser() / word):
        if path.is_dir():
            return _at(LocalFolder(path.absolute()))
    return None


def _at(folder: Folder) -> Found | None:
    """A checkpoint, a folder of checkpoints, or a run that has them somewhere."""
    files = folder.files() if is_url(str(folder)) else {entry.name: 0 for entry in _entries(folder)}
    if not files:
        return None
    if step_of(folder.name) is not None or MANIFEST_NAME in files:
        return Found(folder, is_checkpoint=True)
    if isinstance(folder, LocalFolder) and (elsewhere := _directory_of_run(folder.path)) is not None:
        return Found(open_folder(elsewhere), is_checkpoint=False, run=folder.path)
    names = folder.folders()
    if "checkpoints" in names and not any(step_of(name) is not None for name in names):
        return Found(folder.child("checkpoints"), is_checkpoint=False, run=_run_at(folder))
    run = _run_at(folder.parent()) if isinstance(folder, LocalFolder) else None
    return Found(folder, is_checkpoint=False, run=run or _run_at(folder))


def _run_at(folder: Folder) -> Path | None:
    return folder.path if isinstance(folder, LocalFolder) and (folder.path / "config.yaml").is_file() else None


def _entries(folder: Folder) -> list[Path]:
    return list(Path(str(folder)).iterdir())


def _directory_of_run(run: Path) -> str | None:
    """Where the run in this folder keeps its checkpoints, if it says so; None: below itself, or it is no run."""
    try:
        values: Any = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        asked = values["checkpoint"]["directory"]
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        return None
    if not isinstance(asked, str):
        return None
    return f"{asked.rstrip('/')}/{run.name}" if is_url(asked) else str(Path(asked) / run.name)


def list_checkpoints(directory: Folder, *, read_bytes: bool = False) -> list[Listed]:
    """Everything in a folder of checkpoints: the committed ones by step, then what is left over.

    Args:
        directory: the folder.
        read_bytes: compare checksums too, not only names and sizes.
    """
    entries = [look_at(folder, read_bytes=read_bytes) for _, folder in committed_folders(directory)]
    if any(entry.faults for entry in entries):
        # A run that trains meanwhile deletes old ones: what has gone is not damaged.
        there = {str(folder) for _, folder in committed_folders(directory)}
        entries = [entry for entry in entries if not entry.faults or str(entry.folder) in there]
    for leftover in leftovers(directory):
        size_bytes = sum(leftover.folder.files().values())
        entries.append(Listed(leftover.folder, leftover.what, (), size_bytes, None))
    return entries


def look_at(folder: Folder, *, read_bytes: bool = False) -> Listed:
    """One committed checkpoint as it is."""
    try:
        manifest = read_manifest(folder)
    except ValueError:
        manifest = None
    faults = tuple(faults_of_folder(folder, read_bytes=read_bytes))
    size_bytes = sum(folder.files().values())
    return Listed(folder, "damaged" if faults else "complete", faults, size_bytes, manifest)


def newest_of(entries: Sequence[Listed]) -> Listed | None:
    """The one that a run goes on from."""
    complete = [entry for entry in entries if entry.state == "complete"]
    return max(complete, key=lambda entry: entry.step or 0, default=None)
