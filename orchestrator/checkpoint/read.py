"""Loading a sharded checkpoint under any parallel plan, strictly: names, shapes and types agree or nothing is touched.

State is a dict of tensors, DTensors, plain values and dicts of those, with the same names under every plan; each rank
asks for its part and reads only the bytes of its shards. `load_newest` falls back over damaged checkpoints and says so.
Writing is in `write.py`, the folder's rules in `folder.py`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from orchestrator.checkpoint.folder import (
    BROKEN,
    Checkpoint,
    Location,
    committed_folders,
    faults_of_folder,
    open_checkpoint,
    set_aside,
)
from orchestrator.checkpoint.manifest import faults_of
from orchestrator.checkpoint.ranks import CheckpointError, Ranks
from orchestrator.checkpoint.shard_reader import ShardReader
from orchestrator.checkpoint.shard_writer import METADATA_NAME
from orchestrator.checkpoint.storage import Folder, open_folder
from orchestrator.checkpoint.write import without_single_process_warning

_LOG = logging.getLogger(__name__)

_NAMES_SHOWN = 20


def load(
    checkpoint: Checkpoint,
    state: dict[str, Any],
    *,
    optional: tuple[str, ...] = (),
    verify: bool = True,
    cast: bool = False,
    ranks: Ranks | None = None,
) -> None:
    """Read a checkpoint into a state of the same names, under any parallel plan. Collective.

    Tensors are filled in place, plain values replaced. Nothing of the state is changed unless everything agrees.

    Args:
        checkpoint: from `newest_complete` or `open_checkpoint`.
        state: what to fill; together the ranks must ask for every name that the checkpoint has.
        optional: beginnings of flattened names that may be missing on either side ("rng."); what is missing in the
            checkpoint keeps its value.
        verify: compare every byte with the manifest first, each rank a share of the files.
        cast: take a tensor of another type than the state's and cast it; otherwise it is refused.
        ranks: the group to use; None means the default one.

    Raises:
        CheckpointError: on every rank; lists damaged files, missing and extra names, other shapes and types.
    """
    ranks = ranks or Ranks.of()
    if verify:
        faults = _faults(checkpoint, ranks)
        if faults:
            raise CheckpointError(f"{checkpoint.path} is damaged: {'; '.join(faults)}")
    reader = ShardReader(data_folder(checkpoint))
    flat, _ = flatten_state_dict(state)
    asked = ranks.together("read the metadata", lambda: _disagreements(flat, reader.read_metadata(), cast))
    metadata = reader.read_metadata()
    _raise_if_different(checkpoint, asked, metadata, optional)
    wanted = {name: value for name, value in flat.items() if name in metadata.state_dict_metadata}
    try:
        with without_single_process_warning():
            load_shards(wanted, storage_reader=reader, process_group=ranks.group, no_dist=ranks.alone)
    except CheckpointException as error:
        raise CheckpointError(f"could not read {checkpoint.path} ({error})") from error
    _put_back(state, flat, wanted)


def load_newest(
    directory: Location,
    state: dict[str, Any],
    *,
    optional: tuple[str, ...] = (),
    ranks: Ranks | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """Load the newest checkpoint whose every byte agrees with its manifest. Collective.

    Damaged ones that are newer are set aside once it has been found; where all are damaged they stay as they are.

    Returns:
        The checkpoint that was loaded (None: there is no whole one, the state is untouched) and one message for each
        damaged one that was passed over.

    Raises:
        CheckpointError: a whole checkpoint does not fit the state; an older one would not either.
    """
    ranks = ranks or Ranks.of()
    damaged: dict[str, list[str]] = {}
    while True:
        path, found = ranks.on_first("look for checkpoints", partial(_newest, directory, frozenset(damaged)))
        damaged |= found
        if path is None:
            return None, _passed_over(damaged)
        checkpoint = open_together(path, ranks)
        faults = _faults(checkpoint, ranks)
        if not faults:
            load(checkpoint, state, optional=optional, verify=False, ranks=ranks)
            ranks.on_first("set damaged checkpoints aside", partial(_set_aside, list(damaged)))
            return checkpoint, _passed_over(damaged)
        damaged[path] = faults


def _newest(directory: Location, known: frozenset[str]) -> tuple[str | None, dict[str, list[str]]]:
    """(the newest that looks complete, faults of those above it by path), without those that are known as damaged."""
    damaged: dict[str, list[str]] = {}
    for _, folder in reversed(committed_folders(directory)):
        if str(folder) in known:
            continue
        faults = faults_of_folder(folder)
        if not faults:
            return str(folder), damaged
        damaged[str(folder)] = faults
    return None, damaged


def _passed_over(damaged: dict[str, list[str]]) -> list[str]:
    return [
        f"Checkpoint {path} is passed over, it is damaged: {'; '.join(faults)}." for path, faults in damaged.items()
    ]


def _set_aside(paths: list[str]) -> None:
    for path in paths:
        try:
            set_aside(path, BROKEN)
        except OSError as error:
            _LOG.warning("The damaged checkpoint %s stays where it is (%s).", path, error)


def open_together(location: str, ranks: Ranks) -> Checkpoint:
    """The same complete checkpoint on every rank, looked at by rank 0 alone. Collective. Raises CheckpointError."""
    manifest = ranks.on_first(f"open {location}", lambda: open_checkpoint(location).manifest)
    return Checkpoint(open_folder(location), manifest)


def data_folder(checkpoint: Checkpoint) -> Folder:
    """Where the files of a checkpoint lie: its folder, or the one in it that its manifest names.

    Raises:
        CheckpointError: its manifest names no metadata.
    """
    for record in checkpoint.manifest.files:
        prefix, slash, name = record.path.rpartition("/")
        if name == METADATA_NAME:
            return checkpoint.folder.child(prefix) if slash else checkpoint.folder
    raise CheckpointError(f"{checkpoint.path} does not fit: its manifest names no {METADATA_NAME}")


def _faults(checkpoint: Checkpoint, ranks: Ranks) -> list[str]:
    """Faults of all files, each rank reading its share."""

    def read_share() -> list[str]:
        share = checkpoint.manifest.files[ranks.rank :: ranks.size]
        return faults_of(checkpoint.folder, checkpoint.manifest, read_bytes=True, records=share)

    return [fault for part in ranks.together("verify the checkpoint", read_share) for fault in part]


def _disagreements(flat: dict[str, Any], metadata: Metadata, cast: bool) -> tuple[set[str], list[str]]:
    """(names that this rank asks for, shapes and types that differ from the saved ones)."""
    different = []
    for name, value in flat.items():
        saved = metadata.state_dict_metadata.get(name)
        if saved is None:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if isinstance(saved, BytesStorageMetadata):
            if is_tensor:
                different.append(f"{name} is a tensor here and a plain value there")
        elif not is_tensor:
            different.append(f"{name} is a plain value here and a tensor there")
        elif isinstance(saved, TensorStorageMetadata):
            if saved.size != value.shape:
                different.append(f"{name} has shape {tuple(value.shape)} here and {tuple(saved.size)} there")
            elif saved.properties.dtype != value.dtype and not cast:
                different.append(f"{name} is {value.dtype} here and {saved.properties.dtype} there")
    return set(flat), different


def _raise_if_different(
    checkpoint: Checkpoint, asked: list[tuple[set[str], list[str]]], metadata: Metadata, optional: tuple[str, ...]
) -> None:
    names = {name for part, _ in asked for name in part if not name.startswith(optional or ("\0",))}
    saved = {name for name in metadata.state_dict_metadata if not name.startswith(optional or ("\0",))}
    different = sorted({line for _, lines in asked for line in lines})
    parts = [
        f"{len(found)} {what}: {_shown(found)}"
        for what, found in (
            ("missing in the checkpoint", sorted(names - saved)),
            ("in the checkpoint but not asked for", sorted(saved - names)),
            ("different", different),
        )
        if found
    ]
    if parts:
        raise CheckpointError(f"{checkpoint.path} does not fit: {'. '.join(parts)}")


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _put_back(state: dict[str, Any], flat: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Plain values cannot be filled in place: write them where they came from in the nested state."""
    _, paths = flatten_state_dict(state)
    for name, value in loaded.items():
        if value is flat[name] or isinstance(value, torch.Tensor):
            continue
        target: Any = state
        *parents, last = paths[name]
        for key in parents:
            target = target[key]
        target[last] = value
