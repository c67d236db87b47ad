"""The engine's parts that need no second process: initial weights, schedule, loss, optimizer groups, buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.parameters import Init, ParameterSpec
from models.spec import parameter_specs
from orchestrator.engine.data_parallel import _buckets
from orchestrator.engine.gradients import scale, squared_norm
from orchestrator.engine.initialise import fill
from orchestrator.engine.mesh import axis_sizes
from orchestrator.engine.optimizer import build_optimizer, set_learning_rate
from orchestrator.engine.rendezvous import leave
from orchestrator.engine.schedule import learning_rate
from tests.engine.cases import tiny_config, tiny_plan
from tests.engine.gloo import on_ranks

pytestmark = pytest.mark.torch


def spec(shape: tuple[int, ...], name: str = "w", kind: str = "normal") -> ParameterSpec:
    return ParameterSpec(name, shape, None, "head", True, True, Init(kind, 0.02), 0)  # type: ignore[arg-type]


def drawn(part: tuple[slice, ...], described: ParameterSpec, seed: int = 0) -> torch.Tensor:
    shape = [len(range(*cut.indices(size))) for cut, size in zip(part, described.shape, strict=True)]
    tensor = torch.empty(shape)
    fill(tensor, [cut.start or 0 for cut in part], described, seed, torch.Generator())
    return tensor


WHOLE = slice(None)


@pytest.mark.parametrize("shape", [(1000, 48), (5, 300_000), (700,), (257, 3)])
def test_a_part_of_a_parameter_gets_the_values_that_it_has_in_the_whole(shape: tuple[int, ...]) -> None:
    described = spec(shape)
    whole = drawn(tuple(WHOLE for _ in shape), described)
    for ranks in (2, 3, 8):
        for dim in range(len(shape)):
            step = -(-shape[dim] // ranks)
            for first in range(0, shape[dim], step):
                cut = tuple(
                    slice(first, min(first + step, shape[dim])) if d == dim else WHOLE for d in range(len(shape))
                )
                assert torch.equal(drawn(cut, described), whole[cut])


def test_initial_weights_differ_by_name_seed_and_block_and_have_the_asked_spread() -> None:
    described = spec((4096, 256))
    whole = drawn((WHOLE, WHOLE), described)
    assert whole.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(whole.mean().item()) < 1e-4
    assert not torch.equal(whole[:256], whole[256:512])
    assert not torch.equal(whole, drawn((WHOLE, WHOLE), spec((4096, 256), name="v")))
    assert not torch.equal(whole, drawn((WHOLE, WHOLE), described, seed=1))


def test_what_a_seed_means_never_changes() -> None:
    # A few values of the first and the last block, to 6 digits: vector units may differ in the last bit.
    values = drawn((WHOLE, WHOLE), spec((600, 64)))
    assert values[0, :3].tolist() == pytest.approx([-0.004381, -0.017317, 0.0024884], abs=1e-6)
    assert values[-1, -3:].tolist() == pytest.approx([0.0290916, -0.0009537, -0.0014664], abs=1e-6)


def test_norms_start_at_one_and_biases_at_zero() -> None:
    assert torch.equal(drawn((WHOLE,), spec((8,), kind="ones")), torch.ones(8))
    assert torch.equal(drawn((WHOLE,), spec((8,), kind="zeros")), torch.zeros(8))


@pytest.mark.parametrize(
    ("changes", "step", "wanted"),
    [
        ({"warmup_steps": 4}, 1, 0.25),
        ({"warmup_steps": 4}, 4, 1.0),
        ({"warmup_steps": 4, "minimum_ratio": 0.1}, 12, 0.55),
        ({"warmup_steps": 4, "minimum_ratio": 0.1}, 20, 0.1),
        ({"name": "linear", "minimum_ratio": 0.0}, 10, 0.5),
        ({"name": "linear", "minimum_ratio": 0.2, "decay_steps": 10}, 10, 0.2),
        ({"name": "linear", "minimum_ratio": 0.2, "decay_steps": 10}, 17, 0.2),
        ({"name": "constant", "warmup_steps": 2}, 1, 0.5),
        ({"name": "constant", "warmup_steps": 2}, 20, 1.0),
        ({"warmup_steps": 20}, 20, 1.0),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(changes: dict[str, Any], step: int, wanted: float) -> None:
    optimizer = tiny_config(optimizer__lr=2.0, optimizer__schedule=changes).optimizer
    assert learning_rate(optimizer, step, 20) == pytest.approx(2.0 * wanted)


def test_the_learning_rate_never_rises_after_the_warm_up() -> None:
    for name in ("cosine", "linear", "constant"):
        optimizer = tiny_config(optimizer__schedule={"name": name, "warmup_steps": 3}).optimizer
        rates = [learning_rate(optimizer, step, 30) for step in range(1, 31)]
        assert rates[:3] == sorted(rates[:3])
        assert rates[2:] == sorted(rates[2:], reverse=True)


def test_matrices_decay_and_vectors_do_not() -> None:
    config = tiny_config(model__tie_word_embeddings=True)
    specs = [one for one in parameter_specs(config.model) if one.tied_to is None]
    parameters = {one.name: nn.Parameter(torch.zeros(one.shape)) for one in specs}
    optimizer = build_optimizer(config.optimizer, parameters, specs)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(parameters)
    for name, parameter in parameters.items():
        assert decays[id(parameter)] == (0.1 if parameter.dim() > 1 else 0.0), name
    set_learning_rate(optimizer, 0.5)
    assert all(group["lr"] == 0.5 for group in optimizer.param_groups)


def test_the_squared_norm_is_that_of_all_gradients_together() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((2, 2), 1.0)]
    assert squared_norm(gradients).item() == pytest.approx(16.0)
    scale(gradients, 0.5)
    assert squared_norm(gradients).item() == pytest.approx(4.0)
    assert squared_norm([]).item() == 0.0


@pytest.mark.parametrize(
    ("bucket_bytes", "wanted"), [(1, [1, 1, 1, 1, 1]), (400, [1, 1, 1, 1, 1]), (800, [2, 2, 1]), (10**9, [5])]
)
def test_buckets_hold_consecutive_layers_up_to_their_size(bucket_bytes: int, wanted: list[int]) -> None:
    layers: list[nn.Module] = [nn.Linear(10, 10, bias=False) for _ in range(5)]
    buckets = _buckets([[layer] for layer in layers], bucket_bytes)
    assert [len(bucket) for bucket in buckets] == wanted
    assert [layer for bucket in buckets for layer in bucket] == layers


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"data": 8}, (1, 8, 1, 1, 1)),
        ({"data": 8, "zero_stage": 3}, (1, 1, 8, 1, 1)),
        ({"data": 8, "zero_stage": 2, "zero_group": 4}, (1, 2, 4, 1, 1)),
        ({"data": 2, "tensor": 2, "pipeline": 2, "zero_stage": 1}, (2, 1, 2, 1, 2)),
    ],
)
def test_the_mesh_always_has_all_axes(changes: dict[str, int], wanted: tuple[int, ...]) -> None:
    plan = tiny_plan(**{f"parallel__{key}": value for key, value in changes.items()}, training__micro_batch_size=1)
    assert plan.parallel is not None
    assert axis_sizes(plan.parallel) == wanted


def build_over_too_few(rank: int, world: int) -> str:
    from orchestrator.engine.mesh import build_mesh

    plan = tiny_plan(parallel__data=2)
    assert plan.parallel is not None
    try:
        build_mesh(plan.parallel, "cpu")
    except ValueError as error:
        return str(error)
    return "built"


def test_a_mesh_of_another_size_than_the_ranks_is_refused_with_the_arithmetic() -> None:
    (message,) = on_ranks(1, build_over_too_few)
    assert "replicate 2" in message
    assert "= 2 ranks, but 1 ranks were started" in message


def leave_after_work(rank: int, world: int, folder: Path) -> list[str]:
    if rank == world - 1:  # the last one has something to do yet
        sum(index for index in range(5_000_000))
    (folder / str(rank)).touch()
    leave()
    return sorted(path.name for path in folder.iterdir())


def test_no_rank_leaves_before_all_have_done_their_work(tmp_path: Path) -> None:
    assert on_ranks(3, leave_after_work, tmp_path) == [["0", "1", "2"]] * 3
