"""What counts as a checkpoint, what a killed save leaves behind, what may be deleted: names, sizes and checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.destination import check_destination
from orchestrator.checkpoint.folder import (
    BROKEN,
    DELETED,
    TEMPORARY,
    Draft,
    commit,
    committed_folders,
    faults_of_folder,
    newest_complete,
    open_checkpoint,
    remove_leftovers,
    set_aside,
)
from orchestrator.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    describe,
    manifest_from_dict,
    problems_of_resuming,
    read_manifest,
    record_file,
    step_name,
    step_of,
)
from orchestrator.checkpoint.retention import Retention, apply_retention
from orchestrator.checkpoint.start import check_length, check_start
from orchestrator.checkpoint.storage import LocalFolder
from tests.core.run_cases import manifest_of, run_config, run_plan


def checkpoint(directory: Path, step: int, name: str | None = None, **facts: Any) -> Path:
    """A complete checkpoint of two files, as a save leaves it."""
    folder = directory / (name or step_name(step))
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"metadata")
    (folder / "__0_0.distcp").write_bytes(b"shard" * step)
    files = tuple(record_file(LocalFolder(folder), path) for path in (".metadata", "__0_0.distcp"))
    (folder / MANIFEST_NAME).write_text(replace(manifest_of(step, **facts), files=files).to_json())
    return folder


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Names


@pytest.mark.parametrize(("step", "name"), [(200, "step-00000200"), (123456789, "step-123456789")])
def test_a_step_and_its_name_say_the_same(step: int, name: str) -> None:
    assert step_name(step) == name
    assert step_of(name) == step


@pytest.mark.parametrize("name", ["step-200", "step-000000200", ".tmp-step-00000200-ab", "step-00000200.bak", "x"])
def test_any_other_name_is_no_checkpoint(name: str) -> None:
    assert step_of(name) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        checkpoint(tmp_path, step // 10**6 + 1, step_name(step))
    assert [step for step, _ in committed_folders(tmp_path)] == [5, 99_999_999, 100_000_000]


# The manifest


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 3)
    manifest = read_manifest(LocalFolder(folder))
    assert manifest_from_dict(json.loads(manifest.to_json())) == manifest
    assert manifest.step == 3
    assert manifest.size_bytes == len(b"metadata") + 15


def test_the_manifest_of_another_schema_is_refused() -> None:
    values = json.loads(manifest_of(1).to_json())
    with pytest.raises(ValueError, match="schema version 99"):
        manifest_from_dict({**values, "schema_version": 99})


@pytest.mark.parametrize(
    ("edited", "named"),
    [
        ({"step": "2"}, "step: "),
        ({"loss": "low"}, "loss: "),
        ({"parallel": []}, "parallel: "),
        ({"config": None}, "config: "),
        ({"files": [{"path": "x", "size_bytes": "y", "checksum": ""}]}, "files.0.size_bytes: "),
        ({"remark": "mine"}, "remark"),
        ({"schema_version": [1]}, "schema version"),
    ],
)
def test_a_manifest_that_was_edited_into_another_type_is_damage_and_named(
    edited: dict[str, Any], named: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, 1)
    folder = checkpoint(tmp_path, 2)
    values = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps(values | edited))
    (fault,) = faults_of_folder(folder)
    assert named in fault
    found = newest_complete(tmp_path)
    assert found is not None
    assert found.step == 1


def test_the_facts_come_from_the_plan() -> None:
    plan = run_plan(run_config("runs", {"training.seed": 7}))
    manifest = describe(plan, step=4, tokens=256, data_fingerprint="f", data_position={"step": 4})
    assert (manifest.step, manifest.tokens, manifest.seed) == (4, 256, 7)
    assert manifest.parallel["world_size"] == 2
    assert manifest.config["model"]["hidden_size"] == 8
    assert manifest.versions.keys() >= {"python", "pydantic"}


def test_other_data_must_not_be_resumed_on() -> None:
    manifest = manifest_of(3, data_fingerprint="old")
    assert problems_of_resuming(manifest, data_fingerprint="old") == ()
    (problem,) = problems_of_resuming(manifest, data_fingerprint="new")
    assert problem.key == "data"
    assert "old" in problem.message
    assert "new" in problem.message


# Complete or not there


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        checkpoint(tmp_path, step)
    found = newest_complete(tmp_path)
    assert found is not None
    assert (found.step, found.path) == (10, str(tmp_path / "step-00000010"))


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_where_nothing_was_saved_nothing_is_found(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    assert newest_complete(tmp_path / folder) is None


def cut(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"sh")


def flip(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[3] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


def remove_shard(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()


def cut_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text('{"step": ')


def rename_to_another_step(folder: Path) -> None:
    manifest = read_manifest(LocalFolder(folder))
    (folder / MANIFEST_NAME).write_text(replace(manifest, step=1).to_json())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut, "__0_0.distcp has 2 bytes"),
        (remove_shard, "__0_0.distcp is missing"),
        (remove_manifest, "manifest.json is missing"),
        (cut_manifest, "manifest.json cannot be read"),
        (rename_to_another_step, "its name says step 20, its manifest step 1"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, 10)
    damage(checkpoint(tmp_path, 20))
    found = newest_complete(tmp_path)
    assert found is not None
    assert found.step == 10
    assert named in caplog.text
    with pytest.raises(ValueError, match=named):
        open_checkpoint(tmp_path / "step-00000020")


def test_a_flipped_bit_is_found_by_reading_every_byte(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 20)
    flip(folder)
    assert faults_of_folder(folder) == []
    (fault,) = faults_of_folder(folder, read_bytes=True)
    assert "__0_0.distcp" in fault
    assert newest_complete(tmp_path, read_bytes=True) is None


# Committing


def draft(directory: Path, step: int) -> tuple[Draft, Manifest]:
    """A save whose shards are written, and the manifest that it is about to get."""
    folder = LocalFolder(checkpoint(directory, step, f".tmp-{step_name(step)}-x"))
    manifest = read_manifest(folder)
    folder.remove_file(MANIFEST_NAME)
    return Draft(folder, ""), manifest


def test_a_commit_is_one_rename(tmp_path: Path) -> None:
    made = draft(tmp_path, 5)
    assert newest_complete(tmp_path) is None
    assert str(commit(*made)) == str(tmp_path / "step-00000005")
    assert names(tmp_path) == ["step-00000005"]


def test_a_complete_checkpoint_of_the_same_step_stays(tmp_path: Path) -> None:
    old = checkpoint(tmp_path, 5)
    (old / "mark").touch()
    commit(*draft(tmp_path, 5))
    assert names(tmp_path) == ["step-00000005"]
    assert (old / "mark").exists()


def test_a_damaged_checkpoint_of_the_same_step_makes_way(tmp_path: Path) -> None:
    cut(checkpoint(tmp_path, 5))
    commit(*draft(tmp_path, 5))
    found = newest_complete(tmp_path, read_bytes=True)
    assert found is not None
    assert found.step == 5
    assert [name for name in names(tmp_path) if name.startswith(BROKEN)]


# Starting from one


def test_a_start_from_a_complete_checkpoint_of_this_model_is_fine(tmp_path: Path) -> None:
    config = run_config("runs")
    folder = checkpoint(tmp_path, 3, config=config.to_dict())
    for key in ("checkpoint.resume", "checkpoint.init_from"):
        assert check_start(run_config("runs", {key: str(folder)})) == ()


@pytest.mark.parametrize("key", ["checkpoint.resume", "checkpoint.init_from"])
def test_a_start_from_what_is_no_checkpoint_is_refused(tmp_path: Path, key: str) -> None:
    (problem,) = check_start(run_config("runs", {key: str(tmp_path / "gone")}))
    assert problem.key == key
    assert "here is no folder" in problem.message
    (tmp_path / "page.md").write_text("words")
    (problem,) = check_start(run_config("runs", {key: str(tmp_path / "page.md")}))
    assert "is a file" in problem.message
    cut(checkpoint(tmp_path, 3))
    (problem,) = check_start(run_config("runs", {key: str(tmp_path / "step-00000003")}))
    assert "__0_0.distcp has 2 bytes" in problem.message


@pytest.mark.parametrize("key", ["checkpoint.resume", "checkpoint.init_from"])
def test_of_a_run_the_newest_complete_checkpoint_is_named_to_be_typed(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.yaml").write_text("checkpoint: {directory: null}\n")
    (problem,) = check_start(run_config("runs", {key: str(tmp_path)}))
    assert "the folder of a run, not a checkpoint, and there is no complete one in it" in problem.message
    newest = checkpoint(tmp_path / "checkpoints", 3)
    cut(checkpoint(tmp_path / "checkpoints", 5))
    for place in (tmp_path, tmp_path / "checkpoints"):
        (problem,) = check_start(run_config("runs", {key: str(place)}))
        assert problem.fix == f"Set {key}={newest}"


def test_going_on_from_one_checkpoint_with_the_weights_of_another_is_refused(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path, 3, config=run_config("runs").to_dict()))
    (problem,) = check_start(run_config("runs", {"checkpoint.resume": folder, "checkpoint.init_from": folder}))
    assert problem.key == "checkpoint.init_from"
    assert "would be ignored" in problem.message


@pytest.mark.parametrize(("length", "key"), [({"steps": 5}, "steps"), ({"steps": None, "tokens": 320}, "tokens")])
def test_a_run_is_not_ended_by_asking_for_fewer_steps_than_it_has(
    tmp_path: Path, length: dict[str, Any], key: str
) -> None:
    checkpoint(tmp_path, 5, config=run_config("runs", {"training.steps": 20}).to_dict())
    shorter = {f"training.{name}": value for name, value in length.items()}
    (problem,) = check_length(run_config("runs", shorter), str(tmp_path))
    assert problem.key == f"training.{key}"
    assert "at step 5 of 20 already" in problem.message
    assert check_length(run_config("runs", {"training.steps": 6}), str(tmp_path)) == ()
    assert check_length(run_config("runs", {**shorter, "checkpoint.resume": "never"}), str(tmp_path)) == ()


def test_a_run_that_was_killed_after_its_last_step_may_still_end(tmp_path: Path) -> None:
    config = run_config("runs", {"training.steps": 5})
    checkpoint(tmp_path, 5, config=config.to_dict())
    assert check_length(config, str(tmp_path)) == ()


def test_a_new_run_is_not_begun_where_nothing_is_left_to_do(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "old", 5, config=run_config("runs", {"training.steps": 5}).to_dict())
    asked = {"training.steps": 5, "checkpoint.resume": str(folder)}
    (problem,) = check_length(run_config("runs", asked), str(tmp_path / "new"))
    assert (problem.key, problem.fix) == ("training.steps", "Set training.steps above 5.")
    assert check_length(run_config("runs", {**asked, "training.steps": 6}), str(tmp_path / "new")) == ()


def test_a_start_from_another_model_names_each_size(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 3, config=run_config("runs").to_dict())
    asked = {"checkpoint.init_from": str(folder), "model.hidden_size": 16, "model.vocab_size": 300}
    problems = check_start(run_config("runs", asked))
    assert {"model.hidden_size", "model.vocab_size"} <= {problem.key for problem in problems}
    assert "hidden_size=8" in problems[0].message


def test_a_run_is_not_resumed_from_weights_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (problem,) = check_start(run_config("runs", {"checkpoint.resume": str(tmp_path)}))
    assert "weights alone" in problem.message
    assert f"checkpoint.init_from={tmp_path}" in problem.fix


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another_of_its_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3, config=run_config("runs").to_dict())
    new = run_config("runs", {"checkpoint.resume": "never"})
    (problem,) = check_destination(new, str(tmp_path))
    assert problem.key == "checkpoint.directory"
    assert "the newest of step 3" in problem.message
    assert check_destination(new, str(tmp_path), continues=True) == ()
    assert check_destination(new, str(tmp_path / "elsewhere")) == ()
    assert check_destination(run_config("runs"), str(tmp_path)) == ()
    other = run_config("runs", {"model.vocab_size": 300})
    assert [problem.key for problem in check_destination(other, str(tmp_path))] == ["model.vocab_size"]


# Left-overs and retention


def test_left_overs_of_killed_saves_go_and_checkpoints_and_strangers_stay(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 6, f"{TEMPORARY}step-00000006-ab")
    checkpoint(tmp_path, 4, f"{DELETED}step-00000004-cd")
    (tmp_path / "notes.txt").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["notes.txt", "step-00000005"]


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [100]), (2, [9, 100]), (9, [1, 2, 9, 100])])
def test_the_newest_by_number_are_kept(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    folders = {step: checkpoint(tmp_path, step) for step in (1, 2, 9, 100)}
    apply_retention(tmp_path, Retention(keep_last), committed=LocalFolder(folders[100]))
    assert [step for step, _ in committed_folders(tmp_path)] == kept
    assert all(not name.startswith(".") for name in names(tmp_path))


def test_what_the_run_resumed_from_is_never_deleted(tmp_path: Path) -> None:
    folders = {step: checkpoint(tmp_path, step) for step in (1, 2, 3)}
    apply_retention(tmp_path, Retention(1), committed=LocalFolder(folders[3]), protected=[str(folders[1])])
    assert [step for step, _ in committed_folders(tmp_path)] == [1, 3]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    folders = {step: checkpoint(tmp_path, step) for step in (1, 2, 3)}
    cut(folders[2])
    apply_retention(tmp_path, Retention(2), committed=LocalFolder(folders[3]))
    assert [step for step, _ in committed_folders(tmp_path)] == [1, 3]


def test_a_deletion_that_was_killed_leaves_no_half_checkpoint_under_its_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 5)
    aside = set_aside(folder, DELETED)
    cut(Path(str(aside)))
    assert committed_folders(tmp_path) == []
    assert newest_complete(tmp_path) is None


def test_a_checkpoint_that_is_a_link_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    archived = checkpoint(tmp_path / "archive", 1)
    newest = checkpoint(tmp_path / "run", 2)
    (tmp_path / "run" / step_name(1)).symlink_to(archived)
    apply_retention(tmp_path / "run", Retention(1), committed=LocalFolder(newest))
    assert names(tmp_path / "run") == [step_name(2)]
    assert faults_of_folder(archived) == []
