"""What `inventory --write` does with a file that is there already. No Ray."""

from __future__ import annotations

from pathlib import Path

from orchestrator.cli.inventory import _keep


def test_a_file_that_says_something_else_is_kept_under_another_name(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    assert _keep(file, "new") is None
    for number, text in enumerate(("my notes", "more notes"), start=1):
        file.write_text(text)
        kept = _keep(file, "new")
        assert kept == tmp_path / f"ours.yaml.{number}"
        assert kept.read_text() == text
    file.write_text("new")
    assert _keep(file, "new") is None
    assert file.read_text() == "new"
