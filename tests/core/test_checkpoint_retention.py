"""Which checkpoints stay: the newest, one of every interval, the best; and what never goes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from orchestrator.checkpoint.folder import committed_folders
from orchestrator.checkpoint.retention import Retention, apply_retention, kept_steps
from orchestrator.checkpoint.storage import LocalFolder
from tests.core.run_cases import manifest_of
from tests.core.test_checkpoint_folder import checkpoint, cut

LOSSES = {100: 3.0, 200: 2.0, 300: 2.5, 400: None, 500: math.nan, 1000: 2.2}
"""Validation loss by step; 400 was not validated."""


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (Retention(), [100, 200, 300, 400, 500, 1000]),
        (Retention(keep_last=1), [1000]),
        (Retention(keep_last=2), [500, 1000]),
        (Retention(keep_last=1, keep_every_steps=200), [200, 400, 1000]),
        (Retention(keep_last=1, keep_every_steps=500), [500, 1000]),
        (Retention(keep_last=1, keep_best=1), [200, 1000]),
        (Retention(keep_last=1, keep_best=2), [200, 1000]),
        (Retention(keep_last=1, keep_best=3), [200, 300, 1000]),
        (Retention(keep_last=1, keep_every_steps=300, keep_best=1), [200, 300, 1000]),
    ],
)
def test_the_newest_those_of_an_interval_and_the_best_are_kept(rules: Retention, kept: list[int]) -> None:
    manifests = [manifest_of(step, validation_loss=loss) for step, loss in LOSSES.items()]
    assert sorted(kept_steps(manifests, rules)) == kept
    assert sorted(kept_steps(manifests[::-1], rules)) == kept


def test_nothing_that_was_not_validated_counts_as_best() -> None:
    assert kept_steps([manifest_of(step) for step in (1, 2, 3)], Retention(keep_last=1, keep_best=2)) == {3}


def steps(directory: Path) -> list[int]:
    return [step for step, _ in committed_folders(directory)]


def test_the_best_stays_until_a_better_one_is_committed(tmp_path: Path) -> None:
    rules = Retention(keep_last=1, keep_best=1)
    for step, loss, kept in ((1, 2.0, [1]), (2, 3.0, [1, 2]), (3, 2.5, [1, 3]), (4, 1.5, [4])):
        folder = checkpoint(tmp_path, step, validation_loss=loss)
        apply_retention(tmp_path, rules, committed=LocalFolder(folder))
        assert steps(tmp_path) == kept


def test_what_was_resumed_from_stays_however_its_path_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {step: checkpoint(tmp_path / "real", step) for step in (1, 2, 3)}
    (tmp_path / "link").symlink_to(tmp_path / "real")
    protected = [str(tmp_path / "link" / folders[1].name)]
    apply_retention(tmp_path / "real", Retention(1), committed=LocalFolder(folders[3]), protected=protected)
    assert steps(tmp_path / "real") == [1, 3]


def test_the_last_good_one_stays_when_all_newer_ones_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    cut(tmp_path / "step-00000002")
    cut(tmp_path / "step-00000003")
    committed = checkpoint(tmp_path, 4)
    apply_retention(tmp_path, Retention(2), committed=LocalFolder(committed))
    assert steps(tmp_path) == [1, 4]
