"""Dropout under every plan: tensor ranks drop alike what they hold alike, and each its own of what it holds alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.gloo import on_ranks
from tests.engine.parity import Case, RankTrace, batches, run_cases, together
from tests.engine.parity_cases import GPT, TIED, case, pipeline, recompute, tensor, zero

pytestmark = pytest.mark.torch

STREAM = {"model__resid_pdrop": 0.2}
HEADS = {"model__attention_dropout": 0.2}
BOTH = STREAM | HEADS
STEPS = 2


@contextmanager
def masks_of(parts: Any, kept: dict[str, list[Tensor]]) -> Iterator[None]:
    """Collects what dropout modules let through, and what attention with dropout makes of values that are all one."""
    handles = []
    for stage in parts.stages:
        for name, module in stage.named_modules():
            if isinstance(module, nn.Dropout):

                def keep(_: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
                    kept.setdefault(name, []).append((output != 0).clone())

                handles.append(module.register_forward_hook(keep))
            elif name.endswith("core"):

                def ones(_: nn.Module, inputs: Any) -> Any:
                    query, key, value = inputs
                    return query, key, torch.ones_like(value)

                def rows(_: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
                    kept.setdefault(name, []).append(output.detach()[..., 0].clone())

                handles += [module.register_forward_pre_hook(ones), module.register_forward_hook(rows)]
    yield
    for handle in handles:
        handle.remove()


def look(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For every case, by step, what each module let through, and which part of the model the rank is."""
    return [_look(one) for one in cases]


def _look(one: Case) -> dict[str, Any]:
    from orchestrator.engine.build import build
    from orchestrator.engine.compute import seed_step
    from orchestrator.engine.mesh import build_mesh
    from orchestrator.engine.step import MicroBatch, train_step

    plan = one.plan()
    mesh = build_mesh(plan.parallel, "cpu")
    parts = build(plan, mesh, torch.device("cpu"))
    found: list[dict[str, list[Tensor]]] = []
    size = plan.config.training.micro_batch_size
    inputs, labels = batches(one)[0]
    own = inputs.shape[0] // mesh.data_ranks
    rows = slice(mesh.data_rank * own, (mesh.data_rank + 1) * own)
    micro = [MicroBatch(*pair) for pair in zip(inputs[rows].split(size), labels[rows].split(size), strict=True)]
    for step in (1, 2, 1):
        seed_step(plan.config, mesh, step)
        kept: dict[str, list[Tensor]] = {}
        with masks_of(parts, kept):
            train_step(parts, micro, labels.numel())
        found.append(kept)
    return {"tensor": mesh.tensor_rank, "data": mesh.data_rank, "pipeline": mesh.pipeline_rank, "steps": found}


def training(name: str, **changes: Any) -> Case:
    return case(name, "ragged", **{"training__global_batch_size": 8, "training__micro_batch_size": 2, **changes})


LOOKED: dict[int, list[Case]] = {
    2: [
        training("whole stream", **tensor(2), **BOTH),
        training("cut stream", **tensor(2, True), **BOTH, **GPT),
    ],
    4: [training("data and tensor", **(zero(2, 3) | tensor(2)), **BOTH)],
}
LEARNED: list[Case] = [
    training("one", **STREAM),
    training("tensor", **tensor(2), **STREAM),
    training("tensor, recompute", **tensor(2), **STREAM, **recompute("full")),
    training("tensor, tied gpt", **tensor(2), **STREAM, **GPT, **TIED),
    *(
        training(f"{split} stream, {kind}", **tensor(2, split == "cut"), **BOTH, **recompute(kind))
        for split in ("whole", "cut")
        for kind in ("none", "selective", "full")
    ),
    *(
        training(f"{kind} in stages", **pipeline(2, "1f1b"), **BOTH, **recompute(kind))
        for kind in ("none", "full")
    ),
    *(training(f"ZeRO-{stage}", **zero(2, stage), **BOTH) for stage in (0, 2, 3)),
]  # fmt: skip


def learn(rank: int, world: int, cases: list[Case]) -> list[RankTrace]:
    """As `run_cases`, every step seeded as the training loop does."""
    from unittest import mock

    from orchestrator.engine import step
    from orchestrator.engine.compute import seed_step

    real, numbers = step.train_step, iter(range(10**6))

    def seeded(parts: Any, micro: Any, tokens: int) -> Any:
        seed_step(current[0].plan().config, parts.mesh, next(numbers) % 5)
        return real(parts, micro, tokens)

    current: list[Case] = []
    found = []
    with mock.patch.object(step, "train_step", seeded):
        for one in cases:
            current[:] = [one]
            found += run_cases(rank, world, [one])
    return found


@pytest.fixture(scope="module")
def seen() -> dict[str, list[dict[str, Any]]]:
    """What each rank let through, by case."""
    return {
        one.name: [rank[index] for rank in by_rank]
        for world, cases in LOOKED.items()
        for by_rank in [on_ranks(world, look, cases)]
        for index, one in enumerate(cases)
    }


@pytest.fixture(scope="module")
def learned() -> dict[str, list[RankTrace]]:
    """What each rank learned, by case."""
    one, *others = LEARNED
    by_rank = on_ranks(2, learn, others)
    found = {case.name: [rank[index] for rank in by_rank] for index, case in enumerate(others)}
    return {one.name: [on_ranks(1, learn, [one])[0][0]], **found}


def every(rank: dict[str, Any], step: int, of: str) -> list[Tensor]:
    """What all modules of a kind let through in a step, module by module and micro-batch by micro-batch."""
    return [mask for name, masks in sorted(rank["steps"][step].items()) if name.endswith(of) for mask in masks]


def alike(first: list[Tensor], second: list[Tensor]) -> bool:
    assert len(first) == len(second) > 0
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def unlike(first: list[Tensor], second: list[Tensor]) -> bool:
    assert len(first) == len(second) > 0
    return not any(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_tensor_ranks_drop_the_same_of_a_stream_that_all_of_them_hold(seen: dict[str, list[dict[str, Any]]]) -> None:
    first, second = seen["whole stream"]
    assert alike(every(first, 0, "dropout"), every(second, 0, "dropout"))


def test_tensor_ranks_drop_their_own_of_a_stream_that_is_cut_along_the_sequence(
    seen: dict[str, list[dict[str, Any]]],
) -> None:
    first, second = seen["cut stream"]
    assert unlike(every(first, 0, "dropout"), every(second, 0, "dropout"))


@pytest.mark.parametrize("name", ["whole stream", "cut stream"])
def test_tensor_ranks_drop_their_own_inside_of_their_heads(name: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    first, second = seen[name]
    assert unlike(every(first, 0, "core"), every(second, 0, "core"))


def test_data_ranks_drop_their_own_and_tensor_ranks_of_each_the_same(seen: dict[str, list[dict[str, Any]]]) -> None:
    for first, second in combinations(seen["data and tensor"], 2):
        same = first["data"] == second["data"]
        assert (alike if same else unlike)(every(first, 0, "dropout"), every(second, 0, "dropout"))
        assert unlike(every(first, 0, "core"), every(second, 0, "core"))


@pytest.mark.parametrize("name", [one.name for cases in LOOKED.values() for one in cases])
@pytest.mark.parametrize("kind", ["dropout", "core"])
def test_every_layer_micro_batch_and_step_has_masks_of_its_own_and_a_step_again_has_the_same(
    name: str, kind: str, seen: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in seen[name]:
        masks = every(rank, 0, kind)
        assert not any(torch.equal(*pair) for pair in combinations(masks, 2))
        assert unlike(masks, every(rank, 1, kind))
        # The weights have moved on meanwhile: attention's own values too, but not what is dropped of a stream.
        if kind == "dropout":
            assert alike(masks, every(rank, 2, kind))


@pytest.mark.parametrize("name", ["whole stream", "cut stream", "data and tensor"])
def test_as_much_is_dropped_as_was_asked_for_and_independently(
    name: str, seen: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = seen[name]
    kept = [torch.cat([mask.flatten().double() for mask in every(rank, 0, "dropout")]) for rank in ranks]
    for one in kept:
        # Five standard deviations of a mean of n draws.
        assert abs(one.mean() - 0.8) < 5 * 0.4 / one.numel() ** 0.5
    for (index, first), (other, second) in combinations(enumerate(kept), 2):
        if name == "cut stream" or ranks[index]["data"] != ranks[other]["data"]:
            together_kept = (first * second).mean()
            assert abs(together_kept - 0.64) < 5 * (0.64 * 0.36 / first.numel()) ** 0.5


def test_a_stream_held_by_all_tensor_ranks_learns_what_one_process_learns(learned: dict[str, list[RankTrace]]) -> None:
    (one,) = learned["one"]
    for name in ("tensor", "tensor, recompute"):
        assert learned[name][0].losses == pytest.approx(one.losses, abs=1e-5)
        assert learned[name][0].norms == pytest.approx(one.norms, rel=1e-4)


@pytest.mark.parametrize("split", ["whole stream", "cut stream"])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_drops_the_same_again(kind: str, split: str, learned: dict[str, list[RankTrace]]) -> None:
    plain, again = together(learned[f"{split}, none"])[1], together(learned[f"{split}, {kind}"])[1]
    assert again.losses == plain.losses
    for found, wanted in zip(again.gradients, plain.gradients, strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_recomputation_in_a_pipeline_drops_the_same_again(learned: dict[str, list[RankTrace]]) -> None:
    plain, again = learned["none in stages"], learned["full in stages"]
    assert again[0].losses == plain[0].losses
    assert again[0].norms == plain[0].norms


@pytest.mark.parametrize("stage", [2, 3])
def test_how_states_are_sharded_changes_nothing_that_is_dropped(
    stage: int, learned: dict[str, list[RankTrace]]
) -> None:
    assert learned[f"ZeRO-{stage}"][0].losses == pytest.approx(learned["ZeRO-0"][0].losses, abs=1e-5)


def test_ranks_hold_the_same_weights_after_training_with_dropout(learned: dict[str, list[RankTrace]]) -> None:
    for name in ("tensor, tied gpt", "cut stream, none", "ZeRO-3", "none in stages"):
        ranks = learned[name]
        together(ranks)
        assert all(rank.norms == ranks[0].norms for rank in ranks)
