"""Where a path is meant and where an object store can be: what is refused from the text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.paths import with_absolute_paths
from orchestrator.config.validate import problems_of
from orchestrator.tracking.identity import checkpoint_directory
from tests.core.run_cases import run_config


@pytest.mark.parametrize(
    "place", ["s3://bucket/prefix", "s3://bucket/a/b/", "checkpoints", "/shared/checkpoints", "~/c"]
)
def test_folders_and_s3_are_fine(place: str) -> None:
    assert problems_of(run_config("runs", {"checkpoint.directory": place})) == ()


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("s3:/bucket/prefix", "Write s3://bucket/prefix."),
        ("s3://bucket", "Write s3://BUCKET/PREFIX."),
        ("s3:///prefix", "Write s3://BUCKET/PREFIX."),
        ("gs://bucket/prefix", "Use s3://, or a folder that all nodes share."),
        ("file:///shared/c", "Use the path /shared/c, or a folder that all nodes share."),
    ],
)
@pytest.mark.parametrize("key", ["checkpoint.directory", "checkpoint.resume", "checkpoint.init_from"])
def test_other_urls_are_refused_with_what_to_write(key: str, place: str, fix: str) -> None:
    (problem,) = problems_of(run_config("runs", {key: place}))
    assert problem.key == key
    assert problem.fix == fix


def test_a_runs_folder_is_no_object_store() -> None:
    (problem,) = problems_of(run_config("s3://bucket/runs"))
    assert problem.key == "run.directory"


def test_a_url_stays_as_it_is_where_paths_are_made_absolute() -> None:
    config = with_absolute_paths(run_config("runs", {"checkpoint.directory": "s3://bucket/a"}), Path("/here"))
    assert config.checkpoint.directory == "s3://bucket/a"
    assert checkpoint_directory(config, "/here/runs/mine") == "s3://bucket/a/mine"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"checkpoint.keep_every_steps": 250, "checkpoint.every_steps": 100}, "checkpoint.keep_every_steps"),
        ({"checkpoint.keep_every_steps": 250, "checkpoint.every_steps": 0}, "checkpoint.keep_every_steps"),
        ({"checkpoint.keep_best": 2, "training.validate_every_steps": 0}, "checkpoint.keep_best"),
    ],
)
def test_keeping_what_is_never_saved_is_refused(changes: dict[str, int], key: str) -> None:
    (problem,) = problems_of(run_config("runs", changes))
    assert problem.key == key


def test_keeping_what_is_saved_is_fine() -> None:
    changes = {"checkpoint.keep_every_steps": 500, "checkpoint.every_steps": 100, "checkpoint.keep_best": 1}
    assert problems_of(run_config("runs", {**changes, "training.validate_every_steps": 50})) == ()
