"""A folder that is there whole or not at all: written under another name, synced, and renamed at the end. No torch.

Its writer holds a lock on it for as long as it lives; what a killed writer has left is known by that and removed by the
next one for the same target.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from orchestrator.checkpoint.storage import LocalFolder

TEMPORARY = ".tmp-"


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A new folder beside `target` to write into; it gets that name when the block ends, and goes if it raises.

    Raises FileExistsError when the target has appeared meanwhile, OSError when it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
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
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _remove_leftovers(target: Path) -> None:
    """Delete what killed writers of this target have left."""
    for path in target.parent.glob(f"{TEMPORARY}{escape(target.name)}-????????"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            if _take_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
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
