"""When a run saves, what it keeps, and what a save that fails does to it: whole ranks on real files."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import storage
from orchestrator.checkpoint.folder import committed_folders, newest_complete
from orchestrator.checkpoint.read import load_newest
from orchestrator.checkpoint.store import CheckpointWriter
from tests.core.run_cases import manifest_of
from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.gloo import RanksFailedError, TestLink, live

pytestmark = pytest.mark.torch


def run(directory: Path, *, attempt: int = 1, stop_at_step: dict[int, int] | None = None, **changes: Any) -> TestLink:
    return live(tasks_of(tiny_plan(**changes), directory, attempt=attempt), stop_at_step)[0]


def record(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps(directory: Path) -> list[int]:
    return [step for step, _ in committed_folders(directory / "checkpoints")]


def saves(link: TestLink) -> list[dict[str, Any]]:
    return [event for event in link.events if event["kind"] == "checkpoint"]


KEEPING = {
    "training__steps": 8,
    "training__validate_every_steps": 1,
    "optimizer__lr": 0.3,
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 1,
    "checkpoint__keep_every_steps": 4,
    "checkpoint__keep_best": 1,
}


def test_the_newest_those_of_the_interval_and_the_best_are_kept_over_a_restart(tmp_path: Path) -> None:
    run(tmp_path, stop_at_step={0: 6}, **KEEPING)
    link = run(tmp_path, attempt=2, **KEEPING)
    assert link.done()["status"] == "finished"
    validated = {line["step"]: line["validation_loss"] for line in record(tmp_path)}
    best = min(validated, key=lambda step: validated[step])
    resumed = 5
    assert set(steps(tmp_path)) == {best, 4, 8, resumed}
    newest = newest_complete(tmp_path / "checkpoints", read_bytes=True)
    assert newest is not None
    assert newest.manifest.validation_loss == validated[8]
    assert newest.manifest.best_validation_loss == validated[best]
    assert newest.manifest.loss == record(tmp_path)[-1]["loss"]


def test_minutes_count_as_well_as_steps(tmp_path: Path) -> None:
    often = {"checkpoint__every_steps": 0, "checkpoint__every_minutes": 1e-6, "checkpoint__keep_last": 9}
    link = run(tmp_path, training__steps=4, parallel__data=2, **often)
    assert [event["step"] for event in saves(link)] == [1, 2, 3, 4]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_changed_batch_goes_on_where_the_data_stand(tmp_path: Path) -> None:
    """Neither a sample left out nor one read twice, and the resumed steps are those of the new size."""
    changes = {"training__steps": 6, "training__micro_batch_size": 2}
    run(tmp_path, stop_at_step={0: 4}, **changes, training__global_batch_size=8)
    run(tmp_path, attempt=2, **changes, training__global_batch_size=12, parallel__data=2)
    ids = [[sample for rank in line["samples"] for sample in rank] for line in record(tmp_path)]
    assert [len(step) for step in ids] == [8, 8, 8, 12, 12, 12]
    run(tmp_path / "small", **{**changes, "training__steps": 15}, training__global_batch_size=4)
    small = [sample for line in record(tmp_path / "small") for rank in line["samples"] for sample in rank]
    assert [sample for step in ids for sample in step] == small


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_run_names_the_damage_says_so_and_goes_on_from_the_one_before(tmp_path: Path, damage: str) -> None:
    changes = {"training__steps": 4, "checkpoint__every_steps": 1, "checkpoint__keep_last": 3}
    run(tmp_path, stop_at_step={0: 4}, **changes)
    shard = tmp_path / "checkpoints" / "step-00000003" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(data if damage == "flip" else data[:-1])
    link = run(tmp_path, attempt=2, **changes)
    (warning,) = (event["message"] for event in link.events if event["kind"] == "warning")
    assert "step-00000003 is passed over" in warning
    assert "__0_0.distcp" in warning
    assert [event["step"] for event in link.events if event["kind"] == "resumed"] == [2]
    assert link.done()["status"] == "finished"
    assert [line["step"] for line in record(tmp_path)] == [1, 2, 3, 4]


def test_a_run_whose_checkpoints_are_all_damaged_neither_begins_anew_nor_deletes_them(tmp_path: Path) -> None:
    changes = {"training__steps": 4, "checkpoint__every_steps": 1}
    run(tmp_path, stop_at_step={0: 3}, **changes)
    for shard in tmp_path.glob("checkpoints/step-*/__0_0.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(RanksFailedError, match=r"No checkpoint in .* can be gone on from"):
            run(tmp_path, attempt=2, **changes)
    assert steps(tmp_path) == [1, 2]


def failing(tmp_path: Path) -> dict[str, Any]:
    """A run whose checkpoints can never be written: a file lies where their folder should be."""
    (tmp_path / "file").touch()
    return {
        "run__name": "run",
        "parallel__data": 2,
        "training__steps": 4,
        "checkpoint__every_steps": 1,
        "checkpoint__directory": str(tmp_path / "file"),
    }


def test_saves_that_fail_stop_no_run(tmp_path: Path) -> None:
    link = run(tmp_path / "run", **failing(tmp_path))
    assert link.done()["status"] == "finished"
    assert link.done()["result"]["checkpoint"] is None
    assert [event["step"] for event in saves(link)] == [1, 2, 3, 4]
    assert all("rank 0: NotADirectoryError" in event["error"] for event in saves(link))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_ends_the_run_where_that_was_asked(tmp_path: Path, asynchronous: bool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run(
            tmp_path / "run",
            **failing(tmp_path),
            checkpoint__on_failure="stop",
            checkpoint__asynchronous=asynchronous,
        )
    assert set(failed.value.failures) == {0, 1}
    for text in failed.value.failures.values():
        assert "checkpoint.on_failure=stop ends the run" in text
        assert "RunError" in text


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"a": torch.full((1 << 20,), float(step))}}


@pytest.mark.parametrize("call", ["_reserve", "writev", "fsync"])
def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Wherever the lack of room is noticed: when it is reserved, at a write, or at the sync."""
    writer = CheckpointWriter(tmp_path, 1, asynchronous=True)
    writer.save(1, state_of(1), manifest_of(1))
    writer.wait()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage if call == "_reserve" else storage.os, call, full)
    writer.save(2, state_of(2), manifest_of(2))
    writer.wait()
    monkeypatch.undo()
    first, second = writer.take_outcomes()
    assert first.error is None
    assert second.path is None
    assert second.error is not None
    assert "No space left on device" in second.error
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    state = state_of(0)
    assert load_newest(tmp_path, state)[1] == []
    assert torch.equal(state["model"]["a"], state_of(1)["model"]["a"])
    writer.save(3, state_of(3), manifest_of(3))
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"], "there is room again"


def test_a_file_system_that_cannot_reserve_room_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cannot:
        @staticmethod
        def fallocate(*_: Any) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(storage, "_C_LIBRARY", Cannot)
    writer = CheckpointWriter(tmp_path, 1, asynchronous=False)
    writer.save(1, state_of(1), manifest_of(1))
    assert newest_complete(tmp_path, read_bytes=True) is not None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_loads_what_was_written(tmp_path: Path) -> None:
    """The files are torch's distributed format: nobody needs this project to get at a model."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint import load as load_plain

    def state(fill: float) -> dict[str, Any]:
        return {
            "large": torch.full((1000, 33), fill),
            "half": torch.full((3, 2), fill, dtype=torch.bfloat16),
            "scalar": torch.tensor(fill),
            "whole": torch.full((4,), int(fill), dtype=torch.int64),
            "none": torch.empty(0, 3),
            "step": int(fill),
        }

    writer = CheckpointWriter(tmp_path, 1, asynchronous=False)
    writer.save(7, state(7), manifest_of(7))
    found = state(0)
    load_plain(found, storage_reader=FileSystemReader(tmp_path / "step-00000007"), no_dist=True)
    for name, expected in state(7).items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected)), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torchs_own_writer_wrote_is_read(tmp_path: Path) -> None:
    """Checkpoints of before, with torch's writer and SHA-256, still load."""
    from dataclasses import replace

    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as save_plain

    from orchestrator.checkpoint.manifest import FileRecord

    folder = tmp_path / "step-00000003"
    save_plain(state_of(3), storage_writer=FileSystemWriter(folder), no_dist=True)
    import hashlib

    files = tuple(
        FileRecord(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
    )
    values = replace(manifest_of(3), files=files, checksum="sha256", schema_version=1).to_dict()
    new = ("loss", "validation_loss", "best_validation_loss", "saved_at")
    (folder / "manifest.json").write_text(json.dumps({key: value for key, value in values.items() if key not in new}))
    state = state_of(0)
    checkpoint, passed_over = load_newest(tmp_path, state)
    assert checkpoint is not None
    assert passed_over == []
    assert torch.equal(state["model"]["a"], state_of(3)["model"]["a"])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 3), (2, 3, 4), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_part_of_a_stored_tensor_can_be_read(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from orchestrator.checkpoint.shard_format import archive_around, data_offset
    from orchestrator.checkpoint.shard_reader import read_part

    tensor = (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)
    before, behind = archive_around(dtype, shape)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    path = tmp_path / "shard"
    path.write_bytes(b"in front" + before + data + behind)
    assert not tensor.numel() or data_offset(bytearray(before)) == len(before)
    assert torch.equal(torch.load(_after(path, 8), weights_only=True), tensor)
    with path.open("rb") as stream:
        for cut in [slice(0, None), slice(1, None), slice(0, 1)]:
            part = tensor[tuple(cut for _ in shape)]
            found = torch.zeros_like(part).contiguous()
            offsets = [cut.start if size > cut.start else size for size in shape]
            read_part(stream, 8, (tensor.shape, dtype), offsets, found)  # type: ignore[arg-type]
            assert torch.equal(found, part)


def _after(path: Path, skipped: int) -> Any:
    import io

    return io.BytesIO(path.read_bytes()[skipped:])
