"""Which checkpoints of a run are kept: the newest, one of every interval, the best, and what must never go. No torch.

`kept_steps` decides from the manifests alone; `apply_retention` deletes, and only after a newer checkpoint has been
committed. Nothing here knows how a checkpoint is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.checkpoint.folder import (
    DELETED,
    Location,
    committed_folders,
    faults_of_folder,
    remove_leftovers,
    set_aside,
)
from orchestrator.checkpoint.manifest import Manifest, read_manifest
from orchestrator.checkpoint.storage import Folder, open_folder


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept beside the newest checkpoint."""

    keep_last: int | None = None
    """Newest ones, by step; None: all."""
    keep_every_steps: int | None = None
    """Those whose step is a multiple of this are kept for good; None: none of them."""
    keep_best: int = 0
    """Those with the lowest validation loss, among those of steps that were validated."""


def kept_steps(complete: Sequence[Manifest], rules: Retention) -> set[int]:
    """Steps of the complete checkpoints that the rules keep."""
    steps = sorted(manifest.step for manifest in complete)
    if rules.keep_last is None:
        return set(steps)
    kept = set(steps[-rules.keep_last :])
    if rules.keep_every_steps:
        kept.update(step for step in steps if step % rules.keep_every_steps == 0)
    if rules.keep_best:
        judged = [
            (manifest.validation_loss, manifest.step)
            for manifest in complete
            if manifest.validation_loss is not None and math.isfinite(manifest.validation_loss)
        ]
        kept.update(step for _, step in sorted(judged)[: rules.keep_best])
    return kept


def apply_retention(
    directory: Location, rules: Retention, *, committed: Folder, protected: Iterable[str] = ()
) -> list[str]:
    """Delete old checkpoints after `committed` has been committed; returns the paths that went.

    Kept are those of the rules, `committed` itself and the protected ones (what the run resumed from). Damaged ones
    below the newest go too: they no longer count and cannot be loaded. A checkpoint stops being one in one step before
    it is emptied, so that no half-deleted one keeps its name.
    """
    never = {committed.identity(), *(open_folder(path).identity() for path in protected)}
    there = [folder for _, folder in committed_folders(directory)]
    complete = {str(folder): read_manifest(folder) for folder in there if not faults_of_folder(folder)}
    kept = kept_steps(list(complete.values()), rules)
    removed = []
    for folder in there:
        path = str(folder)
        if folder.identity() in never or (path in complete and complete[path].step in kept):
            continue
        set_aside(folder, DELETED).remove()
        removed.append(path)
    remove_leftovers(directory, damaged=True, unfinished=False)
    return removed
