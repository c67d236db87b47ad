"""The run's checkpoints for the engine: `CheckpointWriter` saves while training goes on, `load` reads.

A save blocks the step only for the copy of the state; writing, checksums, manifest and rename happen in a thread with a
gloo group of its own, one save in flight. What went wrong on one rank is known to all, and a failed save is a warning
and an outcome, never the end of the run: the checkpoints that were there stay. Blocking work is in `write.py` and
`read.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from orchestrator.checkpoint.folder import Checkpoint, Location, newest_complete, open_checkpoint, remove_leftovers
from orchestrator.checkpoint.manifest import Manifest, describe
from orchestrator.checkpoint.ranks import CheckpointError, Ranks
from orchestrator.checkpoint.read import load, load_newest
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.storage import open_folder
from orchestrator.checkpoint.write import save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "SaveOutcome",
    "describe",
    "load",
    "load_newest",
    "newest_complete",
    "open_checkpoint",
    "save",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of one save; the same on every rank except for the times."""

    step: int
    path: str | None
    """Path or URL of the checkpoint; None if it failed."""
    error: str | None
    """Why it failed, naming the ranks; None if it is committed."""
    blocked_seconds: float
    """Time that the step waited: an unfinished earlier save, then the copy (the whole save when not asynchronous)."""
    write_seconds: float
    """Time from the copy to the commit."""
    size_bytes: int
    """All files over all ranks; 0 if it failed."""


class CheckpointWriter:
    """Saves into one folder. Made once on every rank (collective), used by every rank at the same steps.

    Args:
        directory: folder (or URL) of the run's checkpoints, shared by all ranks; left-overs of killed saves in it are
            deleted.
        retention: which checkpoints are kept; a number: that many of the newest.
        asynchronous: write in a thread; otherwise `save` returns after the commit.
        protected: checkpoints that are never deleted: what the run resumed from.
        raise_on_failure: raise a failed save's CheckpointError from the next `save`, `wait` or `close` instead of
            warning.
    """

    def __init__(
        self,
        directory: Location,
        retention: Retention | int,
        asynchronous: bool,
        *,
        protected: Iterable[Location] = (),
        raise_on_failure: bool = False,
    ) -> None:
        self.directory = open_folder(directory)
        self._retention = Retention(keep_last=retention) if isinstance(retention, int) else retention
        self._asynchronous = asynchronous
        self._protected = tuple(str(open_folder(path)) for path in protected)
        self._raise_on_failure = raise_on_failure
        self._ranks = Ranks.own_group()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._stager = _make_stager() if asynchronous else None
        self._in_flight: Future[SaveOutcome] | None = None
        self._finished: list[SaveOutcome] = []
        self._last_step: int | None = None
        self._failure: str | None = None
        if self._ranks.rank == 0:
            self._clean_up()

    def _clean_up(self) -> None:
        try:
            for path in remove_leftovers(self.directory):
                _LOG.info("Removed %s, left by a save that was killed.", path)
        except OSError as error:
            _LOG.warning("Left-overs in %s could not be removed (%s).", self.directory, error)

    def save(self, step: int, state: dict[str, Any], manifest: Manifest) -> None:
        """Save the state of a step. Collective. A step already saved or in flight here is not saved twice.

        Returns after the copy (asynchronous) or the commit. The state may change as soon as it returns.

        Raises:
            CheckpointError: only with `raise_on_failure`, on every rank.
        """
        began = time.monotonic()
        self.wait()
        if step == self._last_step:
            return
        self._last_step = step
        if self._threads is None:
            self._settle(self._write(step, state, manifest, None, began, began))
            self.wait()
            return
        staged, failure = self._copy(state)
        copied = time.monotonic()
        self._in_flight = self._threads.submit(self._write, step, staged, manifest, failure, began, copied)

    @property
    def must_stop(self) -> bool:
        """Whether this rank knows of a failed save and was asked to raise it; others may know later."""
        return self._raise_on_failure and self._failure is not None

    def wait(self) -> None:
        """Return when no save is in flight. Call it before the ranks part.

        Raises:
            CheckpointError: a save failed; only with `raise_on_failure`, on every rank.
        """
        if self._in_flight is not None:
            outcome = self._in_flight.result()
            self._in_flight = None
            self._settle(outcome)
        if self.must_stop:
            failure, self._failure = self._failure, None
            raise CheckpointError(failure)

    def take_outcomes(self) -> tuple[SaveOutcome, ...]:
        """Saves that have ended since the last call, in order; never blocks, not collective."""
        if self._in_flight is not None and self._in_flight.done():
            outcome = self._in_flight.result()
            self._in_flight = None
            self._settle(outcome)
        taken, self._finished = tuple(self._finished), []
        return taken

    def close(self) -> None:
        """Wait for the save in flight and end the thread; the copy's memory is released. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            if self._stager is not None:
                self._stager.close()

    def _copy(self, state: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        assert self._stager is not None
        try:
            staged = self._stager.stage(state)
        except Exception as error:  # Told to the other ranks inside the write: they are on their way to it already.
            return {}, f"copy the state: {type(error).__name__}: {error}"
        assert isinstance(staged, dict)
        return staged, None

    def _write(
        self, step: int, state: dict[str, Any], manifest: Manifest, failure: str | None, began: float, copied: float
    ) -> SaveOutcome:
        path, error, size_bytes = None, None, 0
        try:
            self._ranks.together("copy the state", lambda: _raise(failure))
            checkpoint = save(
                self.directory,
                step,
                state,
                manifest,
                retention=self._retention,
                protected=self._protected,
                ranks=self._ranks,
            )
            path, size_bytes = checkpoint.path, checkpoint.manifest.size_bytes
        except Exception as reason:
            error = str(reason)
        now = time.monotonic()
        blocked = (copied if self._asynchronous else now) - began
        return SaveOutcome(step, path, error, blocked, now - copied, size_bytes)

    def _settle(self, outcome: SaveOutcome) -> None:
        self._finished.append(outcome)
        if outcome.error is None:
            return
        # Not saved, so the same step may be tried again (at a stop right after a failed save).
        self._last_step = None
        self._failure = outcome.error
        if self._ranks.rank == 0 and not self._raise_on_failure:
            _LOG.warning("The checkpoint of step %d was not saved: %s.", outcome.step, outcome.error)


def _raise(failure: str | None) -> None:
    if failure is not None:
        raise RuntimeError(failure)


def _make_stager() -> DefaultStager:
    """Copies into memory that is kept from save to save; pinned when there is a GPU to copy from."""
    cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
    )
