"""A folder of checkpoints: which are complete, what a killed save left, how a save gets its name. No torch.

`newest_complete` is what a run resumes from. On a file system `step-00000200` is a committed checkpoint, `.tmp-*` one
being written, `.broken-*` one that was found damaged, `.deleted-*` one being removed. An object store knows no rename:
there a save writes its files below `step-00000200/<name of its own>/`, and `step-00000200/manifest.json`, which names
them, is the commit. What no manifest names is a left-over once no writer is alive. Retention: `retention.py`.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.checkpoint.manifest import MANIFEST_NAME, Manifest, faults_of, read_manifest, step_name, step_of
from orchestrator.checkpoint.storage import Folder, LocalFolder, open_folder

_LOG = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
BROKEN = ".broken-"
DELETED = ".deleted-"

Location = str | os.PathLike[str] | Folder
"""Path or URL, or the folder there."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    folder: Folder
    manifest: Manifest

    @property
    def path(self) -> str:
        """Path or URL."""
        return str(self.folder)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint being written."""

    folder: Folder
    """Where its manifest goes."""
    prefix: str
    """Before the names of its other files, seen from there: empty, or a folder of this save's own with a slash."""

    @property
    def data(self) -> Folder:
        """Where its files go."""
        return self.folder.child(self.prefix.rstrip("/")) if self.prefix else self.folder


def committed_folders(directory: Location) -> list[tuple[int, Folder]]:
    """(step, folder) of everything with a committed checkpoint's name, in numeric order of the step."""
    parent = open_folder(directory)
    named = sorted((step, parent.child(name)) for name in parent.folders() if (step := step_of(name)) is not None)
    # In an object store the name is there from the first byte on, the manifest from the commit on.
    return [(step, folder) for step, folder in named if folder.renames or folder.has(MANIFEST_NAME)]


def faults_of_folder(location: Location, *, read_bytes: bool = False) -> list[str]:
    """Why a folder is no complete checkpoint; empty when it is one."""
    folder = open_folder(location)
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        return [f"its name says step {named}, its manifest step {manifest.step}"]
    return faults_of(folder, manifest, read_bytes=read_bytes)


def open_checkpoint(location: Location, *, read_bytes: bool = False) -> Checkpoint:
    """One checkpoint by its path or URL, checked against its manifest (names and sizes; with `read_bytes` every byte).

    Raises:
        ValueError: it is not complete; the message names every fault.
        StorageError: an object store does not answer.
    """
    folder = open_folder(location)
    faults = faults_of_folder(folder, read_bytes=read_bytes)
    if faults:
        raise ValueError(f"{folder} is not a complete checkpoint: {'; '.join(faults)}")
    return Checkpoint(folder, read_manifest(folder))


def newest_complete(directory: Location, *, read_bytes: bool = False, skip: Iterable[str] = ()) -> Checkpoint | None:
    """The committed checkpoint with the highest step whose files agree with its manifest, or None.

    Damaged ones are passed over with a warning that names what is wrong. Names and sizes are compared; `read_bytes`
    compares checksums too. `skip` are paths that do not count.
    """
    skipped = set(skip)
    for _, folder in reversed(committed_folders(directory)):
        if str(folder) in skipped:
            continue
        faults = faults_of_folder(folder, read_bytes=read_bytes)
        if not faults:
            return Checkpoint(folder, read_manifest(folder))
        _LOG.warning("Checkpoint %s is passed over, it is damaged: %s.", folder, "; ".join(faults))
    return None


def set_aside(location: Location, prefix: str) -> Folder:
    """Take a checkpoint out of the committed ones in one step; returns where it is now.

    On a file system it gets another, unique name; in an object store its manifest does.
    """
    folder = open_folder(location)
    if isinstance(folder, LocalFolder):
        return folder.rename(f"{prefix}{folder.name}-{uuid.uuid4().hex[:8]}")
    folder.write_whole(f"{prefix}{MANIFEST_NAME}", folder.read(MANIFEST_NAME))
    folder.remove_file(MANIFEST_NAME)
    return folder


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that is no committed checkpoint and that a writer will delete."""

    folder: Folder
    what: str
    """`unfinished save`, `damaged, set aside` or `being deleted`."""


_MEANINGS = {TEMPORARY: "unfinished save", BROKEN: "damaged, set aside", DELETED: "being deleted"}


def leftovers(directory: Location) -> list[Leftover]:
    """What killed saves, interrupted deletions and damage left, as it looks while no writer is alive."""
    parent = open_folder(directory)
    found = []
    for name in sorted(parent.folders()):
        folder = parent.child(name)
        if folder.renames:
            kind = next((prefix for prefix in _MEANINGS if name.startswith(prefix)), None)
            found += [] if kind is None else [Leftover(folder, _MEANINGS[kind])]
        elif step_of(name) is not None:
            found += _object_leftovers(folder)
    return found


def _object_leftovers(folder: Folder) -> list[Leftover]:
    """Of one step in an object store: all of it without a manifest, or what its manifest does not name."""
    if not folder.has(MANIFEST_NAME):
        kind = next((prefix for prefix in (BROKEN, DELETED) if folder.has(f"{prefix}{MANIFEST_NAME}")), TEMPORARY)
        return [Leftover(folder, _MEANINGS[kind])]
    try:
        named = {record.path.partition("/")[0] for record in read_manifest(folder).files}
    except ValueError:
        return []
    return [Leftover(folder.child(name), _MEANINGS[TEMPORARY]) for name in folder.folders() if name not in named]


def remove_leftovers(directory: Location, *, unfinished: bool = True, damaged: bool = False) -> list[str]:
    """Delete what interrupted deletions left, and as asked what killed saves left and what was found damaged.

    `unfinished` only while no other writer of this folder is alive. Returns what went.
    """
    parent = open_folder(directory)
    stays = {_MEANINGS[kind] for kind, goes in ((TEMPORARY, unfinished), (BROKEN, damaged)) if not goes}
    removed = []
    for leftover in leftovers(parent):
        if leftover.what not in stays:
            leftover.folder.remove()
            removed.append(str(leftover.folder))
    if unfinished:
        parent.forget_unfinished()
    return removed


def begin(directory: Location, step: int) -> Draft:
    """A place for a new checkpoint, of a name that no other save has."""
    parent = open_folder(directory)
    own = uuid.uuid4().hex[:8]
    if not parent.renames:
        return Draft(parent.child(step_name(step)), f"{own}/")
    folder = parent.child(f"{TEMPORARY}{step_name(step)}-{own}")
    folder.make()
    return Draft(folder, "")


def abandon(draft: Draft) -> None:
    """Delete what a failed save has written."""
    draft.data.remove()


def commit(draft: Draft, manifest: Manifest) -> Folder:
    """Give a finished checkpoint its manifest and its name; returns its folder.

    When that step is there already and complete, it stays and the new one goes: moving it away first would leave a
    moment without it. A damaged one of that name makes way.
    """
    text = manifest.to_json().encode()
    folder = draft.folder
    if not isinstance(folder, LocalFolder):
        if folder.has(MANIFEST_NAME) and not faults_of_folder(folder):
            abandon(draft)
        else:
            folder.write_whole(MANIFEST_NAME, text)
            _remove_others(folder, draft.prefix.rstrip("/"))
        return folder
    folder.write_whole(MANIFEST_NAME, text)
    final = folder.parent().child(step_name(manifest.step))
    if final.path.exists():
        if not faults_of_folder(final):
            set_aside(folder, DELETED).remove()
            return final
        set_aside(final, BROKEN)
    return folder.rename(final.name)


def _remove_others(folder: Folder, own: str) -> None:
    """Delete what earlier saves of the same step have left in an object store: killed ones, or one found damaged."""
    try:
        for name in folder.folders():
            if name != own:
                folder.child(name).remove()
        if folder.has(f"{BROKEN}{MANIFEST_NAME}"):
            folder.remove_file(f"{BROKEN}{MANIFEST_NAME}")
    except OSError as error:
        _LOG.warning("Left-overs in %s could not be deleted (%s).", folder, error)
