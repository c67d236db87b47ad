"""A folder of checkpoints as files: which are complete, what a killed save left, what may be deleted. No torch.

`newest_complete` is what a run resumes from. The names are the protocol: `step-00000200` is a committed checkpoint,
`.tmp-*` one being written, `.broken-*` one that was found damaged, `.deleted-*` one being removed; all but the first
are left-overs once no writer is alive. Nothing here deletes before a newer commit.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.checkpoint.manifest import Manifest, faults_of, read_manifest, step_name, step_of

_LOG = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
BROKEN = ".broken-"
DELETED = ".deleted-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


def sync_folder(folder: Path) -> None:
    """Make names created in or moved into a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def committed_folders(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every folder with a committed checkpoint's name, in numeric order of the step."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = ((step_of(entry.name), entry) for entry in entries if entry.is_dir())
    return sorted((step, path) for step, path in found if step is not None)


def faults_of_folder(path: Path, *, read_bytes: bool = False) -> list[str]:
    """Why a folder is no complete checkpoint; empty when it is one."""
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return [str(error)]
    named = step_of(path.name)
    if named is not None and named != manifest.step:
        return [f"its name says step {named}, its manifest step {manifest.step}"]
    return faults_of(path, manifest, read_bytes=read_bytes)


def open_checkpoint(path: str | os.PathLike[str], *, read_bytes: bool = False) -> Checkpoint:
    """One checkpoint by its path, checked against its manifest (names and sizes; every byte with `read_bytes`).

    Raises:
        ValueError: it is not complete; the message names every fault.
    """
    folder = Path(path)
    faults = faults_of_folder(folder, read_bytes=read_bytes)
    if faults:
        raise ValueError(f"{folder} is not a complete checkpoint: {'; '.join(faults)}")
    return Checkpoint(folder, read_manifest(folder))


def newest_complete(
    directory: str | os.PathLike[str], *, read_bytes: bool = False, skip: Iterable[Path] = ()
) -> Checkpoint | None:
    """The committed checkpoint with the highest step whose files agree with its manifest, or None.

    Damaged ones are passed over with a warning that names what is wrong. Names and sizes are compared; `read_bytes`
    compares checksums too.
    """
    skipped = set(skip)
    for _, path in reversed(committed_folders(Path(directory))):
        if path in skipped:
            continue
        faults = faults_of_folder(path, read_bytes=read_bytes)
        if not faults:
            return Checkpoint(path, read_manifest(path))
        _LOG.warning("Checkpoint %s is passed over, it is damaged: %s.", path, "; ".join(faults))
    return None


def set_aside(path: Path, prefix: str) -> Path:
    """Take a folder out of the committed names in one rename; returns its new, unique name."""
    target = path.with_name(f"{prefix}{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(target)
    return target


def remove_leftovers(directory: Path, *, prefixes: tuple[str, ...] = (TEMPORARY, DELETED)) -> list[Path]:
    """Delete what killed saves and interrupted deletions left. Only while no writer of this folder is alive."""
    removed: list[Path] = []
    if not directory.is_dir():
        return removed
    for entry in directory.iterdir():
        if entry.is_dir() and entry.name.startswith(prefixes):
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
    return removed


def apply_retention(directory: Path, *, keep_last: int, committed: Path, protected: Iterable[Path] = ()) -> list[Path]:
    """Delete old checkpoints after `committed` has been committed; returns the names that went.

    Kept are the `keep_last` complete ones with the highest steps, `committed` itself and the protected ones (what the
    run resumed from). Damaged ones below the newest go too: they no longer count and cannot be loaded. A folder is
    renamed before it is emptied, so that no half-deleted checkpoint keeps its name.
    """
    kept = {committed.resolve(), *(path.resolve() for path in protected)}
    complete = [path for _, path in committed_folders(directory) if not faults_of_folder(path)]
    kept.update(path.resolve() for path in complete[-keep_last:])
    removed = []
    for _, path in committed_folders(directory):
        if path.resolve() in kept:
            continue
        shutil.rmtree(set_aside(path, DELETED), ignore_errors=True)
        removed.append(path)
    remove_leftovers(directory, prefixes=(DELETED, BROKEN))
    return removed


def commit(temporary: Path, directory: Path, step: int) -> Path:
    """Give a finished checkpoint its name in one rename; returns its path.

    When that step is there already and complete, it stays and the new one goes: moving it away first would leave a
    moment without it. A damaged one of that name is moved aside and deleted by the retention that follows.
    """
    final = directory / step_name(step)
    if final.exists():
        if not faults_of_folder(final):
            shutil.rmtree(set_aside(temporary, DELETED), ignore_errors=True)
            return final
        set_aside(final, BROKEN)
    temporary.rename(final)
    sync_folder(directory)
    return final
