"""A path means the same to the command and to every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.paths import with_absolute_paths
from tests.core.run_cases import run_config


@pytest.mark.parametrize(
    ("key", "typed", "meant"),
    [
        ("run.directory", "runs", "/here/runs"),
        ("data.path", "texts/**/*.py", "/here/texts/**/*.py"),
        ("data.path", "/data/x.txt", "/data/x.txt"),
        ("data.tokenizer", "bytes", "bytes"),
        ("data.tokenizer", "t/tokenizer.json", "/here/t/tokenizer.json"),
        ("checkpoint.directory", "~/c", f"{Path.home()}/c"),
        ("checkpoint.directory", None, None),
        ("checkpoint.resume", "auto", "auto"),
        ("checkpoint.resume", "never", "never"),
        ("checkpoint.resume", "runs/a/checkpoints/step-00000010", "/here/runs/a/checkpoints/step-00000010"),
    ],
)
def test_paths_are_meant_where_they_are_typed(key: str, typed: str | None, meant: str | None) -> None:
    config = with_absolute_paths(run_config("/r", {key: typed}), Path("/here"))
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == meant


def test_nothing_else_changes_and_it_can_be_done_twice() -> None:
    config = run_config("runs")
    once = with_absolute_paths(config, Path("/here"))
    assert with_absolute_paths(once, Path("/elsewhere")) == once
    assert {**once.to_dict(), "run": {}} == {**config.to_dict(), "run": {}}
