"""Saving and loading over ranks: what was saved is what is loaded, and one rank's failure is known to all.

One start of two gloo ranks runs all cases that need two; the rest runs in this process.
"""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from orchestrator.checkpoint import write
from orchestrator.checkpoint.folder import committed_folders, newest_complete, open_checkpoint
from orchestrator.checkpoint.manifest import FileRecord
from orchestrator.checkpoint.read import load, load_newest
from orchestrator.checkpoint.store import CheckpointError, CheckpointWriter
from tests.core.run_cases import manifest_of
from tests.engine.gloo import on_ranks

pytestmark = pytest.mark.torch


def plain_state(fill: float = 0.0, **more: Any) -> dict[str, Any]:
    """A state as one process has it."""
    fill = float(fill)
    state: dict[str, Any] = {
        "model": {"a.weight": torch.full((5, 4), fill), "b.weight": torch.full((3,), fill, dtype=torch.bfloat16)},
        "optimizer": {"a.weight.exp_avg": torch.full((5, 4), 2 * fill), "a.weight.step": torch.tensor(fill)},
        "position": {"step": int(fill), "tokens": int(64 * fill)},
    }
    state["model"].update(more)
    return state


def is_filled(state: dict[str, Any], fill: float) -> bool:
    expected = plain_state(fill)
    model, optimizer = state["model"], state["optimizer"]
    return (
        all(torch.equal(model[name], expected["model"][name]) for name in expected["model"])
        and all(torch.equal(optimizer[name], expected["optimizer"][name]) for name in expected["optimizer"])
        and state["position"] == expected["position"]
    )


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def saved(directory: Path, step: int, **more: Any) -> Path:
    writer = CheckpointWriter(directory, retention=10, asynchronous=False)
    writer.save(step, plain_state(step, **more), manifest_of(step))
    (outcome,) = writer.take_outcomes()
    assert outcome.path is not None
    return Path(outcome.path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_was_saved_is_loaded(tmp_path: Path, asynchronous: bool) -> None:
    writer = CheckpointWriter(tmp_path, retention=2, asynchronous=asynchronous)
    for step in (1, 2, 3):
        writer.save(step, plain_state(step), manifest_of(step))
    writer.close()
    assert [outcome.step for outcome in writer.take_outcomes()] == [1, 2, 3]
    assert [step for step, _ in committed_folders(tmp_path)] == [2, 3]
    state = plain_state()
    checkpoint, passed_over = load_newest(tmp_path, state)
    assert checkpoint is not None
    assert (checkpoint.step, passed_over) == (3, [])
    assert is_filled(state, 3)


def test_the_manifest_lists_every_file_with_its_checksum(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    checkpoint = open_checkpoint(path, read_bytes=True)
    assert {record.path for record in checkpoint.manifest.files} | {"manifest.json"} == names(path)
    assert checkpoint.manifest.tokens == 64


def test_training_may_change_the_state_while_it_is_written(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, retention=2, asynchronous=True)
    state = plain_state(7)
    writer.save(7, state, manifest_of(7))
    for part in ("model", "optimizer"):
        for tensor in state[part].values():
            tensor.fill_(-1)
    state["position"]["step"] = -1
    writer.close()
    loaded = plain_state()
    load_newest(tmp_path, loaded)
    assert is_filled(loaded, 7)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, retention=2, asynchronous=True)
    writer.save(4, plain_state(4), manifest_of(4))
    writer.save(4, plain_state(4), manifest_of(4))
    writer.close()
    assert len(writer.take_outcomes()) == 1


def test_nothing_is_loaded_where_nothing_was_saved(tmp_path: Path) -> None:
    state = plain_state(5)
    assert load_newest(tmp_path, state) == (None, [])
    assert is_filled(state, 5)


def test_files_that_rank_0_never_sees_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_VISIBLE_SECONDS", 0.0)
    elsewhere = FileRecord("__1_0.distcp", 10, "0" * 32)
    monkeypatch.setattr(write, "_write_shards", lambda *_: [elsewhere])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing: is .* one folder for all nodes\?"):
        write.save(tmp_path, 1, plain_state(1), manifest_of(1))
    assert list(tmp_path.iterdir()) == []


# Strictness


def test_missing_extra_and_different_names_are_listed_and_nothing_is_touched(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, 1, extra=torch.zeros(1), resized=torch.zeros(2)))
    state = plain_state(5, missing=torch.zeros(1), resized=torch.zeros(3))
    state["model"]["b.weight"] = torch.full((3,), 5.0)
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint, state)
    message = str(refused.value)
    assert "1 missing in the checkpoint: model.missing" in message
    assert "1 in the checkpoint but not asked for: model.extra" in message
    assert "model.resized has shape (3,) here and (2,) there" in message
    assert "model.b.weight is torch.float32 here and torch.bfloat16 there" in message
    assert torch.equal(state["model"]["a.weight"], torch.full((5, 4), 5.0))


def test_names_declared_optional_may_be_missing_on_either_side(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, 1, **{"rng.old": torch.zeros(1)}))
    state = plain_state(5, **{"rng.new": torch.ones(1)})
    load(checkpoint, state, optional=("model.rng.",))
    assert torch.equal(state["model"]["rng.new"], torch.ones(1))
    assert state["position"]["step"] == 1


def test_weights_alone_can_be_taken(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, 7))
    state = plain_state()
    load(checkpoint, {"model": state["model"]}, optional=("optimizer.", "position."))
    assert torch.equal(state["model"]["a.weight"], torch.full((5, 4), 7.0))
    assert torch.equal(state["optimizer"]["a.weight.exp_avg"], torch.zeros(5, 4))


def test_a_plain_value_is_not_loaded_into_a_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, 1))
    state = plain_state()
    state["position"]["step"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"position\.step is a tensor here and a plain value there"):
        load(checkpoint, state)


# Damage


def test_a_flipped_bit_is_named_and_the_one_before_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    shard = saved(tmp_path, 2) / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    state = plain_state()
    checkpoint, passed_over = load_newest(tmp_path, state)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert is_filled(state, 1)
    assert len(passed_over) == 1
    assert "step-00000002" in passed_over[0]
    assert "__0_0.distcp" in passed_over[0]
    found = newest_complete(tmp_path)
    assert found is not None
    assert found.step == 1, "it is not taken for good again"
    saved(tmp_path, 2)
    assert is_filled(loaded_from(tmp_path), 2)


def loaded_from(directory: Path) -> dict[str, Any]:
    state = plain_state()
    load_newest(directory, state)
    return state


# Two ranks


def test_two_ranks_save_together_and_fail_together(tmp_path: Path) -> None:
    cases = [
        shards_load_whole_and_elsewhere,
        a_failure_on_one_rank_is_known_to_all,
        a_failure_is_raised_on_all_if_asked,
        a_rank_that_cannot_copy_stops_nobody,
        ranks_ask_for_their_parts_only,
        damage_is_found_together,
    ]
    on_ranks(2, run_cases, tmp_path, cases)
    # What two ranks saved, one process loads: another plan.
    state: dict[str, Any] = {"model": {"w": torch.zeros(7, 3), "r": torch.zeros(2)}, "position": {"step": 0}}
    checkpoint = newest_complete(tmp_path / "shards_load_whole_and_elsewhere")
    assert checkpoint is not None
    load(checkpoint, state)
    assert torch.equal(state["model"]["w"], whole())
    assert state["position"]["step"] == 3


def run_cases(rank: int, world: int, directory: Path, cases: list[Any]) -> None:
    torch.manual_seed(0)
    for case in cases:
        case(rank, directory / case.__name__)
        dist.barrier()


def whole() -> torch.Tensor:
    return torch.arange(21, dtype=torch.float32).reshape(7, 3)


def sharded_state(tensor: torch.Tensor, dim: int = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        "model": {
            "w": distribute_tensor(tensor, mesh, [Shard(dim)]),
            "r": distribute_tensor(torch.ones(2), mesh, [Replicate()]),
        },
        "position": {"step": 0},
    }


def shards_load_whole_and_elsewhere(rank: int, directory: Path) -> None:
    writer = CheckpointWriter(directory, retention=2, asynchronous=True)
    state = sharded_state(whole())  # 7 rows on 2 ranks: uneven.
    state["position"]["step"] = 3
    writer.save(3, state, manifest_of(3))
    writer.wait()
    (outcome,) = writer.take_outcomes()
    assert outcome.error is None
    assert outcome.path is not None
    files = {record.path for record in open_checkpoint(outcome.path, read_bytes=True).manifest.files}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    other = sharded_state(torch.zeros(7, 3), dim=1)
    checkpoint, _ = load_newest(directory, other)
    assert checkpoint is not None
    loaded = other["model"]["w"]
    assert isinstance(loaded, DTensor)
    assert torch.equal(loaded.full_tensor(), whole())
    assert other["position"]["step"] == 3


def a_failure_on_one_rank_is_known_to_all(rank: int, directory: Path) -> None:
    """Rank 1 can write no more than 4 KiB a file, as on a full disk."""
    writer = CheckpointWriter(directory, retention=1, asynchronous=True)
    state = sharded_state(torch.ones(4096, 8))
    writer.save(1, state, manifest_of(1))
    writer.wait()

    def fail() -> None:
        writer.save(2, state, manifest_of(2))
        writer.wait()

    with_small_files(rank == 1, fail)
    writer.save(3, state, manifest_of(3))
    writer.wait()
    first, second, third = writer.take_outcomes()
    assert first.error is None
    assert second.error is not None
    assert "rank 1" in second.error
    assert "rank 0" not in second.error
    assert second.path is None
    assert third.error is None
    dist.barrier()
    assert names(directory) == {"step-00000003"}


def a_failure_is_raised_on_all_if_asked(rank: int, directory: Path) -> None:
    writer = CheckpointWriter(directory, retention=1, asynchronous=False, raise_on_failure=True)
    state = sharded_state(torch.ones(4096, 8))

    def refuse() -> None:
        with pytest.raises(CheckpointError, match="rank 0"):
            writer.save(1, state, manifest_of(1))

    with_small_files(rank == 0, refuse)
    writer.save(1, state, manifest_of(1))
    assert newest_complete(directory) is not None


def a_rank_that_cannot_copy_stops_nobody(rank: int, directory: Path) -> None:
    writer = CheckpointWriter(directory, retention=1, asynchronous=True)
    state = sharded_state(whole())
    if rank == 1:
        state["position"]["step"] = Uncopyable()
    writer.save(1, state, manifest_of(1))
    writer.wait()
    (outcome,) = writer.take_outcomes()
    assert outcome.error is not None
    assert "rank 1" in outcome.error
    assert newest_complete(directory) is None


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise MemoryError("no room for a copy")


def ranks_ask_for_their_parts_only(rank: int, directory: Path) -> None:
    """As with pipeline stages: each rank has names that the other does not have."""
    mine: dict[str, Any] = {"model": {f"layers.{rank}": torch.full((4,), float(rank + 1))}}
    writer = CheckpointWriter(directory, retention=1, asynchronous=True)
    writer.save(1, mine, manifest_of(1))
    writer.wait()
    state: dict[str, Any] = {"model": {f"layers.{1 - rank}": torch.zeros(4)}}
    load_newest(directory, state)
    assert torch.equal(state["model"][f"layers.{1 - rank}"], torch.full((4,), float(2 - rank)))
    checkpoint = newest_complete(directory)
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match=r"not asked for: model\.layers\.1"):
        load(checkpoint, {"model": {"layers.0": torch.zeros(4)}})


def damage_is_found_together(rank: int, directory: Path) -> None:
    writer = CheckpointWriter(directory, retention=2, asynchronous=False)
    for step in (1, 2):
        state = sharded_state(whole() + step)
        state["position"]["step"] = step
        writer.save(step, state, manifest_of(step))
    dist.barrier()
    if rank == 0:
        shard = directory / "step-00000002" / "__1_0.distcp"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    state = sharded_state(torch.zeros(7, 3))
    checkpoint, passed_over = load_newest(directory, state)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "__1_0.distcp" in passed_over[0]
    assert torch.equal(state["model"]["w"].full_tensor(), whole() + 1)


def with_small_files(limited: bool, action: Any) -> None:
    """Run an action while files of this process cannot grow beyond 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        action()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
