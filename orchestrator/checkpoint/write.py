"""Writing one sharded checkpoint with torch's distributed checkpoint (DCP) and committing it.

Every rank writes its own shards where no reader looks, with checksums; the manifest comes last, and one rename gives
the checkpoint its name. Nothing else makes a checkpoint, so a kill at any moment leaves the last complete one. This
blocks; `store.CheckpointWriter` runs it in a thread. Reading: `read.py`; the folder's rules: `folder.py`.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from orchestrator.checkpoint.folder import Checkpoint, Draft, Location, abandon, begin, commit
from orchestrator.checkpoint.manifest import FileRecord, Manifest, faults_of
from orchestrator.checkpoint.ranks import CheckpointError, Ranks, error_words
from orchestrator.checkpoint.retention import Retention, apply_retention
from orchestrator.checkpoint.shard_writer import ShardWriter
from orchestrator.checkpoint.storage import Folder, open_folder

_LOG = logging.getLogger(__name__)

_VISIBLE_SECONDS = 70.0
"""Longer than NFS keeps a folder's entries (60 s by default)."""
_PAUSE_SECONDS = 0.5


def save(
    directory: Location,
    step: int,
    state: dict[str, Any],
    manifest: Manifest,
    *,
    retention: Retention | None = None,
    protected: Iterable[str] = (),
    ranks: Ranks | None = None,
    planner: SavePlanner | None = None,
) -> Checkpoint:
    """Write and commit one checkpoint. Collective: every rank calls it with its own part of the state.

    Args:
        directory: the folder of the run's checkpoints, path or URL; made if missing. Shared by all ranks.
        step: optimizer steps done; names the checkpoint.
        state: what to save; it must not change until the call returns.
        manifest: facts from `manifest.describe`; the files are added here.
        retention: which ones stay after the commit; None: all.
        protected: checkpoints that are never deleted.
        ranks: the group to use; None means the default one.
        planner: who hands over the tensors (an import reads each when it is written); None: they are in the state.

    Raises:
        CheckpointError: on every rank, if it failed on any. The checkpoints that were there are untouched.
    """
    ranks = ranks or Ranks.of()
    folder, prefix = ranks.on_first("make the folder", lambda: _begin(directory, step))
    draft = Draft(open_folder(folder), prefix)
    try:
        records = _write_shards(draft, state, ranks, planner)
        files = tuple(sorted((record for part in ranks.gather(records) for record in part), key=_path_of))
        complete = replace(manifest, step=step, files=files)
        path = ranks.on_first("commit", lambda: str(_commit(draft, complete)))
    except BaseException:
        if ranks.rank == 0:
            _abandon(draft)
        raise
    committed = open_folder(path)
    if retention is not None and ranks.rank == 0:
        try:
            apply_retention(directory, retention, committed=committed, protected=protected)
        except OSError as error:
            _LOG.warning("Old checkpoints in %s could not be deleted (%s).", directory, error)
    return Checkpoint(committed, complete)


def _path_of(record: FileRecord) -> str:
    return record.path


def _begin(directory: Location, step: int) -> tuple[str, str]:
    draft = begin(directory, step)
    return str(draft.folder), draft.prefix


def _abandon(draft: Draft) -> None:
    try:
        abandon(draft)
    except OSError as error:
        _LOG.warning("What a failed save has left in %s could not be deleted (%s).", draft.data, error)


def _write_shards(draft: Draft, state: dict[str, Any], ranks: Ranks, planner: SavePlanner | None) -> list[FileRecord]:
    """Write this rank's part; what it wrote. Raises CheckpointError on every rank."""
    writer = ShardWriter(draft.data, draft.prefix)
    try:
        with without_single_process_warning():
            save_shards(state, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=ranks.alone)
    except CheckpointException as error:
        if isinstance(error.failures.get(ranks.rank, (None,))[0], KeyboardInterrupt):
            raise KeyboardInterrupt from error  # DCP takes it for a failure like any other
        # DCP has already told every rank about every failure.
        shown = "; ".join(f"rank {rank}: {error_words(cause)}" for rank, (cause, _) in error.failures.items())
        raise CheckpointError(shown) from error
    return writer.records


def _commit(draft: Draft, manifest: Manifest) -> Folder:
    _wait_for_files(draft.folder, manifest)
    return commit(draft, manifest)


def _wait_for_files(folder: Folder, manifest: Manifest) -> None:
    """Until rank 0 sees what the others have written: a network file system may show it some seconds late.

    Ranks that never see one another's files would commit a checkpoint that nobody can load.
    """
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while faults := faults_of(folder, manifest, read_bytes=False):
        if time.monotonic() > deadline:
            raise OSError(f"{'; '.join(faults)}: is {folder.parent()} one folder for all nodes?")
        time.sleep(_PAUSE_SECONDS)


@contextmanager
def without_single_process_warning() -> Iterator[None]:
    """DCP warns whenever one process saves alone; here that is a plan like any other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
