"""An uneven vocabulary: padded in memory, in checkpoints never; every plan loads what every other has saved."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor

from tests.engine.cases import tiny_plan
from tests.engine.gloo import on_ranks

pytestmark = pytest.mark.torch

TOKENS = 50257
SIZES: dict[str, Any] = {
    "model__vocab_size": TOKENS,
    "model__hidden_size": 12,
    "model__intermediate_size": 12,
    "model__num_attention_heads": 6,
    "model__num_key_value_heads": 3,
    "model__num_hidden_layers": 3,
    "training__micro_batch_size": 1,
    "training__global_batch_size": 6,
    "model__tie_word_embeddings": True,
}
PLANS: dict[str, dict[str, Any]] = {
    "tensor 3": {"parallel__tensor": 3},
    "data 3, ZeRO-3": {"parallel__data": 3, "parallel__zero_stage": 3},
    "pipeline 3": {"parallel__pipeline": 3},
    "tensor 3, tied over stages": {"parallel__tensor": 3, "parallel__pipeline": 2},
    "tensor 3, ZeRO-2": {"parallel__tensor": 3, "parallel__data": 2, "parallel__zero_stage": 2},
}
WORLD = {"tensor 3, tied over stages": 6, "tensor 3, ZeRO-2": 6}


def save_and_load(rank: int, world: int, folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Each plan trains a step and saves; then each loads what every other has saved."""
    from orchestrator.checkpoint.manifest import describe
    from orchestrator.checkpoint.read import load
    from orchestrator.checkpoint.write import save
    from orchestrator.engine.build import build
    from orchestrator.engine.mesh import build_mesh
    from orchestrator.engine.state import after_loading, state_of
    from orchestrator.engine.step import MicroBatch, train_step

    saved, found = {}, {}
    for name in names:
        plan = tiny_plan(**SIZES, **PLANS[name])
        mesh = build_mesh(plan.parallel, "cpu")
        parts = build(plan, mesh, torch.device("cpu"))
        tokens = torch.randint(0, TOKENS, (6, 17), generator=torch.Generator().manual_seed(1))
        rows = tokens.chunk(mesh.data_ranks)[mesh.data_rank]
        train_step(parts, [MicroBatch(row[None, :-1], row[None, 1:]) for row in rows], 6 * 16)
        facts = describe(plan, step=1, tokens=1, data_fingerprint="", data_position={})
        saved[name] = (parts, save(folder / name, 1, state_of(parts), facts))
        found[name] = _facts(parts)
    for first, second in permutations(names, 2):
        parts = saved[second][0]
        for value in _tensors(state_of(parts)).values():
            _local(value).fill_(7)
        load(saved[first][1], state_of(parts))
        after_loading(parts)
        found[f"{first} to {second}"] = _facts(parts)
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": value for kind, part in state.items() for name, value in part.items()}


def _facts(parts: Any) -> dict[str, Any]:
    """Logical shapes, this rank's parts with where they begin, and the largest value that padding holds."""
    from orchestrator.engine.gradients import local
    from orchestrator.engine.initialise import offsets
    from orchestrator.engine.state import state_of

    tensors = _tensors(state_of(parts))
    padded = {name: parameter for name, parameter in parts.parameters.items() if name in parts.padding.rows}
    beyond = [
        local(parameter)[local(parts.padding.logical(name, parameter)).shape[0] :].abs().sum().item()
        for name, parameter in padded.items()
    ]
    return {
        "parts": {
            name: (tuple(value.shape), offsets(value), _local(value).detach().clone())
            for name, value in tensors.items()
        },
        "beyond": max(beyond, default=0.0),
        "padded": sorted(padded),
    }


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """All tensors put together; every element is on some rank."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, (shape, start, values) in rank["parts"].items():
            target = found.setdefault(name, torch.full(shape, torch.nan))
            target[tuple(slice(low, low + n) for low, n in zip(start, values.shape, strict=True))] = values
    assert all(not bool(tensor.isnan().any()) for tensor in found.values())
    return found


THREE = ["tensor 3", "data 3, ZeRO-3", "pipeline 3"]
SIX = ["tensor 3, ZeRO-2", "tensor 3, tied over stages"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By plan, and by pair of plans, what each rank held."""
    together: dict[str, list[dict[str, Any]]] = {}
    for world, names in ((3, THREE), (6, SIX)):
        by_rank = on_ranks(world, save_and_load, folder, names)
        together |= {name: [rank[name] for rank in by_rank] for name in by_rank[0]}
    return together


@pytest.mark.parametrize("name", [*THREE, *SIX])
def test_a_checkpoint_has_the_vocabulary_s_own_shape(
    name: str, folder: Path, found: dict[str, list[dict[str, Any]]]
) -> None:
    (path,) = (folder / name).iterdir()
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    for key in ("model.embedding.weight", "optimizer.embedding.weight.exp_avg"):
        assert tuple(saved[key].size) == (TOKENS, 12)
        assert sum(chunk.sizes[0] for chunk in saved[key].chunks) == TOKENS
    assert "model.head.weight" not in saved


@pytest.mark.parametrize(("first", "second"), [*permutations(THREE, 2), *permutations(SIX, 2)])
def test_a_checkpoint_of_one_plan_loads_under_another(
    first: str, second: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    wanted, loaded = whole(found[first]), whole(found[f"{first} to {second}"])
    assert set(loaded) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("name", ["tensor 3", *SIX])
def test_padded_rows_are_there_and_stay_zero(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    held = {key for rank in found[name] for key in rank["padded"]}
    assert "embedding.weight" in held
    assert all(rank["beyond"] == 0.0 for rank in found[name])


def test_one_step_under_every_plan_gives_the_same_weights(found: dict[str, list[dict[str, Any]]]) -> None:
    wanted = whole(found["data 3, ZeRO-3"])
    for name in ("tensor 3", "pipeline 3", *SIX):
        for key, value in whole(found[name]).items():
            if key.startswith("optimizer") and key.endswith("exp_avg"):
                torch.testing.assert_close(value, wanted[key], atol=1e-6, rtol=1e-3)
