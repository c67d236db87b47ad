"""Writing one sharded checkpoint with torch's distributed checkpoint (DCP) and committing it.

Every rank writes its own shards to a temporary name; the files are checksummed, the manifest comes last, and one
rename gives the checkpoint its name. Nothing else makes a checkpoint, so a kill at any moment leaves the last complete
one. This blocks; `store.CheckpointWriter` runs it in a thread. Reading: `read.py`; the folder's rules: `folder.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from orchestrator.checkpoint.folder import TEMPORARY, Checkpoint, apply_retention, commit, sync_folder
from orchestrator.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, faults_of, record_file, step_name
from orchestrator.checkpoint.ranks import CheckpointError, Ranks

_LOG = logging.getLogger(__name__)

_VISIBLE_SECONDS = 70.0
"""Longer than NFS keeps a folder's entries (60 s by default)."""
_PAUSE_SECONDS = 0.5


def save(
    directory: str | os.PathLike[str],
    step: int,
    state: dict[str, Any],
    manifest: Manifest,
    *,
    keep_last: int | None = None,
    protected: Iterable[Path] = (),
    ranks: Ranks | None = None,
) -> Checkpoint:
    """Write and commit one checkpoint. Collective: every rank calls it with its own part of the state.

    Args:
        directory: the folder of the run's checkpoints; made if missing. Shared by all ranks.
        step: optimizer steps done; names the checkpoint.
        state: what to save; it must not change until the call returns.
        manifest: facts from `manifest.describe`; the files are added here.
        keep_last: after the commit, delete all but this many; None keeps all.
        protected: checkpoints that are never deleted.
        ranks: the group to use; None means the default one.

    Raises:
        CheckpointError: on every rank, if it failed on any. The checkpoints that were there are untouched.
    """
    ranks = ranks or Ranks.of()
    folder = Path(directory)
    temporary = Path(ranks.on_first("make the folder", lambda: _make_temporary(folder, step)))
    try:
        _write_shards(temporary, state, ranks)
        records = ranks.together("checksum the files", lambda: _own_records(temporary, ranks))
        files = tuple(sorted((record for part in records for record in part), key=lambda record: record.path))
        complete = replace(manifest, step=step, files=files)
        path = ranks.on_first("commit", lambda: _commit(temporary, folder, complete))
    except BaseException:
        if ranks.rank == 0 and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if keep_last is not None and ranks.rank == 0:
        try:
            apply_retention(folder, keep_last=keep_last, committed=path, protected=protected)
        except OSError as error:
            _LOG.warning("Old checkpoints in %s could not be deleted (%s).", folder, error)
    return Checkpoint(path, complete)


def _make_temporary(folder: Path, step: int) -> str:
    # A name of its own for every save: DCP would write over an old one without a word.
    temporary = folder / f"{TEMPORARY}{step_name(step)}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir(parents=True)
    return str(temporary)


def _write_shards(temporary: Path, state: dict[str, Any], ranks: Ranks) -> None:
    writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, overwrite=False)
    try:
        with without_single_process_warning():
            save_shards(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.alone)
    except CheckpointException as error:
        # DCP has already told every rank about every failure.
        shown = "; ".join(
            f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()
        )
        raise CheckpointError(f"could not write {temporary.name} ({shown})") from error


def _own_records(temporary: Path, ranks: Ranks) -> list[FileRecord]:
    """Checksums of the files that this rank wrote (`__<rank>_*`); rank 0 also takes the metadata."""
    names = [path.name for path in temporary.iterdir() if path.name.startswith(f"__{ranks.rank}_")]
    if ranks.rank == 0:
        names.append(".metadata")
    return [record_file(temporary, name) for name in names]


def _commit(temporary: Path, folder: Path, manifest: Manifest) -> Path:
    _wait_for_files(temporary, manifest)
    with (temporary / MANIFEST_NAME).open("w", encoding="utf-8") as stream:
        stream.write(manifest.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(temporary)
    return commit(temporary, folder, manifest.step)


def _wait_for_files(temporary: Path, manifest: Manifest) -> None:
    """Until rank 0 sees what the others have written: a network file system may show it some seconds late.

    Ranks that never see one another's files would commit a checkpoint that nobody can load.
    """
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while faults := faults_of(temporary, manifest, read_bytes=False):
        if time.monotonic() > deadline:
            raise OSError(f"{'; '.join(faults)}: is {temporary.parent} one folder for all nodes?")
        time.sleep(_PAUSE_SECONDS)


@contextmanager
def without_single_process_warning() -> Iterator[None]:
    """DCP warns whenever one process saves alone; here that is a plan like any other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
