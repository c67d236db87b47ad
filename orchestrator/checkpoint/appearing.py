"""A folder that is there whole or not at all. No torch.

On a file system it is written under another name, synced, and renamed at the end. Its writer holds a lock on it for as
long as it lives; what a killed writer has left is known by that and removed by the next one for the same target. In an
object store nothing can be renamed: a writer claims an empty prefix by a file of its own, and the last file that it
writes is the one that makes a folder of the kind.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from orchestrator.checkpoint.storage import Folder, LocalFolder, StorageError

_LOG = logging.getLogger(__name__)

TEMPORARY = ".tmp-"


@contextmanager
def appearing_at(target: Folder) -> Iterator[Folder]:
    """A folder to write into, by whatever way its storage knows of appearing whole; it goes if the block raises.

    Raises FileExistsError when the target is there or somebody else writes it, OSError when it cannot be written.
    """
    if isinstance(target, LocalFolder):
        with appearing(target.path) as temporary:
            yield LocalFolder(temporary)
    else:
        with _claimed(target):
            yield target


@contextmanager
def _claimed(target: Folder) -> Iterator[None]:
    """An empty prefix of an object store for one writer: of two that begin at once, each sees the other's claim."""
    claim = f"{TEMPORARY}{uuid.uuid4().hex[:8]}"
    target.write_whole(claim, b"")
    others = sorted(set(target.files()) - {claim})
    if others:
        target.remove_file(claim)
        raise FileExistsError(f"{target} holds {others[0]}: somebody else writes there, or was interrupted")
    try:
        yield
        target.remove_file(claim)
    except BaseException:
        try:
            target.remove()
        except OSError as error:
            _LOG.warning("What was written below %s could not be deleted (%s).", target, error)
        raise


def left_of(target: Folder, last: str) -> str:
    """What an interrupted writer of `target` has left, in a sentence.

    Args:
        target: what was to appear.
        last: in an object store, the file that is written last.
    """
    if isinstance(target, LocalFolder):
        if target.path.exists():
            return f"{target} is there, complete."
        left = [str(path) for path in _leftovers(target.path)]
        if left:
            return f"Unfinished and left: {', '.join(left)}. The same command removes it."
        return f"Nothing is left of {target}."
    try:
        names = target.files()
    except StorageError as error:
        return f"What is left below {target} is not known ({error})."
    if not names:
        return f"Nothing is left of {target}."
    if last in names:
        return f"{target} is there, complete."
    return f"Unfinished and left below {target}: {', '.join(sorted(names)[:3])} ... Delete them before the next try."


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A new folder beside `target` to write into; it gets that name when the block ends, and goes if it raises.

    Raises FileExistsError when the target has appeared meanwhile, OSError when it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in _leftovers(target):
        shutil.rmtree(path, ignore_errors=True)
    temporary = target.parent / f"{TEMPORARY}{target.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _take_lock(lock)
        yield temporary
        for path in temporary.rglob("*"):
            _sync(path)
        LocalFolder(temporary).sync()
        if target.exists():
            raise FileExistsError(f"{target} has appeared meanwhile")
        temporary.rename(target)
        LocalFolder(target.parent).sync()
    finally:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(lock)


def _leftovers(target: Path) -> Iterator[Path]:
    """Folders that killed writers of this target have left, each locked until the next is asked for."""
    for path in target.parent.glob(f"{TEMPORARY}{escape(target.name)}-????????"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            if _take_lock(lock):
                yield path
        finally:
            os.close(lock)


def _take_lock(descriptor: int) -> bool:
    """Take the lock of a folder; False: somebody has it, or this file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(path: Path) -> None:
    if path.is_dir():
        LocalFolder(path).sync()
        return
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
