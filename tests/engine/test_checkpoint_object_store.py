"""Checkpoints in an object store, against a real S3-speaking server: the same promises without a rename.

One server serves all tests, each with a prefix of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import destination, object_storage
from orchestrator.checkpoint.destination import check_destination
from orchestrator.checkpoint.folder import committed_folders, faults_of_folder, leftovers, newest_complete
from orchestrator.checkpoint.object_storage import hurried
from orchestrator.checkpoint.read import load_newest
from orchestrator.checkpoint.storage import StorageError, open_folder
from orchestrator.checkpoint.store import CheckpointWriter, SaveOutcome
from orchestrator.cli.main import main
from tests.core.run_cases import manifest_of, run_config
from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.checkpoint_writers import Writing, save_without_end
from tests.engine.checkpoint_writers import state_of as written
from tests.engine.gloo import live
from tests.engine.object_store import BUCKET, ObjectStore, object_store

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    server.faults.clear()
    server.asked.clear()
    monkeypatch.setattr(object_storage, "_FIRST_PAUSE_SECONDS", 0.01)
    return server


@pytest.fixture
def place(store: ObjectStore, request: pytest.FixtureRequest) -> str:
    """A URL that no other test uses."""
    return store.url(request.node.name)


def state_of(step: int) -> dict[str, Any]:
    model = {"a": torch.full((700, 300), float(step)), "b": torch.full((3,), float(step), dtype=torch.bfloat16)}
    return {"model": model, "step": step}


def saved(place: str, *steps: int, keep_last: int = 5) -> list[SaveOutcome]:
    writer = CheckpointWriter(place, keep_last, asynchronous=True)
    for step in steps:
        writer.save(step, state_of(step), manifest_of(step))
    writer.close()
    return list(writer.take_outcomes())


def loaded(place: str) -> tuple[int | None, list[str]]:
    state = state_of(0)
    checkpoint, passed_over = load_newest(place, state)
    if checkpoint is not None:
        expected = state_of(checkpoint.step)
        assert state["step"] == checkpoint.step
        assert all(torch.equal(state["model"][name], expected["model"][name]) for name in expected["model"])
    return (None if checkpoint is None else checkpoint.step), passed_over


def steps(place: str) -> list[int]:
    return [step for step, _ in committed_folders(place)]


def test_what_was_saved_is_loaded_and_old_ones_go(place: str) -> None:
    outcomes = saved(place, 1, 2, 3, keep_last=2)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[-1].path == f"{place}/step-00000003"
    assert steps(place) == [2, 3]
    assert leftovers(place) == []
    assert {name.partition("/")[0] for name in open_folder(place).files()} == {"step-00000002", "step-00000003"}
    assert loaded(place) == (3, [])


def test_the_manifest_is_written_last(store: ObjectStore, place: str) -> None:
    saved(place, 1)
    written = [path for method, path in store.asked if method == "PUT" and "step-00000001" in path]
    assert written[-1].partition("?")[0].endswith("/step-00000001/manifest.json")
    assert len(written) == 3


def test_nothing_is_loaded_where_nothing_was_saved(place: str) -> None:
    assert loaded(place) == (None, [])


def test_large_files_go_up_and_come_down_in_parts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_PART_BYTES", 5 << 20)
    state = {"model": {"a": torch.arange(4_000_000, dtype=torch.float32)}}
    writer = CheckpointWriter(place, 2, asynchronous=False)
    writer.save(1, state, manifest_of(1))
    state = {"model": {"a": torch.zeros(4_000_000)}}
    assert load_newest(place, state)[1] == []
    assert torch.equal(state["model"]["a"], torch.arange(4_000_000, dtype=torch.float32))


def test_a_save_without_its_manifest_is_a_left_over(store: ObjectStore, place: str) -> None:
    saved(place, 1)
    open_folder(place).child("step-00000002").child("ab12").write_whole("__0_0.distcp", b"half")
    prefix = place.removeprefix(f"s3://{BUCKET}/")
    store.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/step-00000002/ab12/__1_0.distcp")
    assert steps(place) == [1]
    assert [(leftover.folder.name, leftover.what) for leftover in leftovers(place)] == [
        ("step-00000002", "unfinished save")
    ]
    CheckpointWriter(place, 2, asynchronous=False)  # the next writer cleans up
    assert leftovers(place) == []
    uploads = store.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert not [upload for upload in uploads if upload["Key"].startswith(prefix)]
    assert loaded(place) == (1, [])


def test_a_busy_server_is_asked_again(store: ObjectStore, place: str) -> None:
    for part in ("__0_0.distcp", "manifest.json"):
        store.answer(503, "SlowDown", method="PUT", part=part, times=3)
    (outcome,) = saved(place, 1)
    assert outcome.error is None
    assert loaded(place) == (1, [])


def test_a_refused_save_hurts_nothing_and_says_why(store: ObjectStore, place: str) -> None:
    saved(place, 1)
    store.answer(403, "AccessDenied", method="PUT", part="step-00000002", times=1000)
    (outcome,) = saved(place, 2)
    assert outcome.path is None
    assert outcome.error is not None
    assert "refuses our credentials" in outcome.error
    assert steps(place) == [1]
    assert loaded(place) == (1, [])


def test_damage_is_named_and_the_one_before_is_taken(
    store: ObjectStore, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(place, 1, 2)
    (name,) = (name for name in open_folder(f"{place}/step-00000002").files() if name.endswith("__0_0.distcp"))
    key = f"{place.removeprefix(f's3://{BUCKET}/')}/step-00000002/{name}"
    data = bytearray(store.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    store.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    assert main(["checkpoint", "verify", place]) == 3
    assert name in capsys.readouterr().out
    step, (message,) = loaded(place)
    assert step == 1
    assert name in message
    assert steps(place) == [1], "it is not taken for good again"
    saved(place, 2)
    assert loaded(place) == (2, [])
    assert leftovers(place) == []


def test_checkpoints_are_listed_from_a_url(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved(place, 1, 2)
    assert main(["checkpoint", "ls", place, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["directories"]
    assert [entry["state"] for entry in listed["checkpoints"]] == ["complete", "complete"]
    assert listed["resume"] == f"{place}/step-00000002"
    assert main(["checkpoint", "verify", f"{place}/step-00000001"]) == 0
    assert main(["checkpoint", "ls", f"{place}-nothing"]) == 2


# Before anything starts


def problem_of(place: str, **overrides: Any) -> tuple[str, str]:
    """(message, fix) of the one problem, found in a few seconds."""
    began = time.monotonic()
    (problem,) = check_destination(run_config("runs", {"checkpoint.directory": place, **overrides}), f"{place}/run")
    assert problem.key == "checkpoint.directory"
    assert time.monotonic() - began < 30
    return problem.message, problem.fix


def test_a_store_that_answers_is_fine_and_keeps_no_trace(place: str) -> None:
    assert check_destination(run_config("runs"), place) == ()
    assert open_folder(place).files() == {}


def test_unknown_credentials_are_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")
    object_storage._file_system.cache_clear()
    message, fix = problem_of(place)
    assert "refuses our credentials" in message
    assert "AWS_ACCESS_KEY_ID" in fix
    object_storage._file_system.cache_clear()


def test_a_bucket_that_is_not_there_is_named(store: ObjectStore) -> None:
    message, _ = problem_of("s3://no-such-bucket/prefix")
    assert "no-such-bucket" in message


def test_a_server_that_does_not_answer_is_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(destination, "_PATIENCE_SECONDS", 0.0)
    object_storage._file_system.cache_clear()
    message, fix = problem_of(place)
    assert "http://127.0.0.1:9 does not answer" in message
    assert "AWS_ENDPOINT_URL" in fix
    object_storage._file_system.cache_clear()


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "find_spec", lambda name: None)
    message, fix = problem_of(place)
    assert "s3fs" in message
    assert fix == "pip install 's3fs'"


def test_another_model_under_the_same_name_is_refused(place: str) -> None:
    writer = CheckpointWriter(f"{place}/run", 2, asynchronous=False)
    writer.save(1, state_of(1), manifest_of(1, config=run_config("runs").to_dict()))
    assert check_destination(run_config("runs"), f"{place}/run") == ()
    problems = check_destination(run_config("runs", {"model.intermediate_size": 32}), f"{place}/run")
    assert [problem.key for problem in problems] == ["model.intermediate_size"]


def test_an_outage_ends_after_the_patience_there_is(store: ObjectStore, place: str) -> None:
    store.answer(503, "SlowDown", method="GET", part="", times=10**6)
    with hurried(0.0), pytest.raises(StorageError, match="could not list"):
        newest_complete(place)


# Runs and kills


def test_a_run_goes_on_from_the_store_on_another_machine(store: ObjectStore, place: str, tmp_path: Path) -> None:
    changes = {
        "parallel__data": 2,
        "parallel__zero_stage": 3,
        "training__steps": 6,
        "checkpoint__directory": place,
        "run__name": "run",
    }
    plan = tiny_plan(**changes)
    unbroken = live(tasks_of(tiny_plan(**{**changes, "checkpoint__directory": None}), tmp_path / "unbroken" / "run"))
    first = tasks_of(plan, tmp_path / "here" / "run", environment=store.environment())
    assert live(first, stop_at_step={0: 4})[0].done()["status"] == "stopped"
    assert steps(f"{place}/run") == [3]
    second = tasks_of(plan, tmp_path / "there" / "run", environment=store.environment())
    ended = live(second)[0].done()
    assert ended["status"] == "finished"
    assert ended["result"]["checkpoint"] == f"{place}/run/step-00000006"
    assert ended["result"]["final_loss"] == unbroken[0].done()["result"]["final_loss"]


def test_no_kill_loses_the_last_complete_checkpoint(store: ObjectStore, place: str) -> None:
    """SIGKILL while a file, the metadata or the manifest is on its way: what counts is whole and never older than what
    was said, whether the store has carried the last request out or not."""
    context = multiprocessing.get_context("forkserver")
    for part, carried_out in (("__0_0", True), (".metadata", False), ("manifest", False), ("manifest", True)):
        receiver, sender = context.Pipe(duplex=False)
        writing = Writing(place, 300_000, True, 1, 0, "", environment=store.environment())
        process = context.Process(target=save_without_end, args=(sender, writing, 0), daemon=True)
        process.start()
        sender.close()
        assert receiver.poll(60)
        outcome: SaveOutcome = receiver.recv()
        assert outcome.error is None
        with store.held(part, carried_out=carried_out) as waits:
            assert waits.wait(60)
            process.kill()
            process.join()
            # A file is there as a whole or not at all: of the first one nothing can be seen yet.
            assert [leftover.what for leftover in leftovers(place)] == ["unfinished save"] * (part != "__0_0")
        found = newest_complete(place)
        assert found is not None
        assert found.step >= outcome.step
        assert faults_of_folder(found.folder, read_bytes=True) == []
        state = written(0, writing.numbers, [0])
        checkpoint, passed_over = load_newest(place, state)
        assert checkpoint is not None
        assert passed_over == []
        assert torch.equal(state["model"]["w0"], torch.full((writing.numbers,), float(checkpoint.step)))


def test_the_server_that_the_environment_names_now_is_spoken_with() -> None:
    for _ in range(2):
        with object_store() as server:
            open_folder(server.url("here")).write_whole("file", b"content")
            assert any(method == "PUT" and "here/file" in path for method, path in server.asked)
