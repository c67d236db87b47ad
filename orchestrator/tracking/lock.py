"""One writer for a run's folder: an advisory lock that the kernel releases when its holder dies, and who holds it.

`flock` decides; what stands in the file only tells the second one whom to look for.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.errors import ConfigError, Problem

LOCK_NAME = ".lock"

_TRIES = 5
_PAUSE_SECONDS = 0.05
"""Another command's check (`problem_of_lock`) holds the lock for an instant; a real holder is still there later."""


class RunLock:
    """The lock of a run's folder, held from creation until `release` or the end of the process.

    Raises:
        ConfigError: another live process holds it (the problem says which), or the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            problem = _try(self._descriptor, folder)
            for _ in range(_TRIES):
                if problem is None:
                    break
                time.sleep(_PAUSE_SECONDS)
                problem = _try(self._descriptor, folder)
            if problem is not None:
                raise ConfigError(problem)
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "command": " ".join(sys.argv)[:500],
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise

    def release(self) -> None:
        """Let another command have the run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def problem_of_lock(folder: Path) -> Problem | None:
    """Why the folder's lock could not be taken now, without keeping it; None if it could."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return _try(descriptor, folder)
    finally:
        os.close(descriptor)


def _try(descriptor: int, folder: Path) -> Problem | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return Problem(
                "run.name",
                f"Run folder {folder} is in use by {_holder(descriptor)}.",
                "Wait for it to end or stop it; or give another run.name, or checkpoint.resume=never for a new run.",
            )
        return Problem(
            "run.directory",
            f"The file system of {folder} cannot lock files ({error.strerror}): a second writer could not be kept out.",
            "Put run.directory on a file system with locks; checkpoint.directory may lie elsewhere.",
        )
    return None


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']} since {holder['since']} ({holder['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
