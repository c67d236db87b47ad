"""What each precision keeps, computes and reduces in, on two real ranks; and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestrator.engine.build import build
from orchestrator.engine.gradients import local
from orchestrator.engine.loss_scale import FIRST_SCALE, SMALLEST_SCALE, STEPS_UNTIL_GROWTH, LossScale
from orchestrator.engine.mesh import build_mesh
from orchestrator.engine.state import state_of
from orchestrator.engine.step import MicroBatch, train_step
from tests.engine.gloo import on_ranks
from tests.engine.parity import Case, batches
from tests.engine.reference import IGNORED, Recipe

pytestmark = pytest.mark.torch


def observe(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Types that a case's tensors have, and its losses."""
    return [_observe(case) for case in cases]


def _observe(case: Case) -> dict[str, Any]:
    plan = case.plan()
    mesh = build_mesh(plan.parallel, "cpu")
    parts = build(plan, mesh, torch.device("cpu"))
    seen: dict[str, Any] = {"losses": [], "norms": []}

    def computed(_: Any, inputs: Any, output: torch.Tensor) -> None:
        seen["compute"] = output.dtype

    def reduced(*_: Any) -> None:
        seen["gradients"] = {local(p.grad).dtype for p in parts.parameters.values() if p.grad is not None}

    (block, *_) = parts.stages[0].get_submodule("layers").children()
    block.get_submodule("mlp.down_proj").register_forward_hook(computed)
    parts.optimizer.register_step_pre_hook(reduced)
    size = plan.config.training.micro_batch_size
    for inputs, labels in batches(case):
        own = inputs.shape[0] // mesh.data_ranks
        rows = slice(mesh.data_rank * own, (mesh.data_rank + 1) * own)
        micro = [MicroBatch(*pair) for pair in zip(inputs[rows].split(size), labels[rows].split(size), strict=True)]
        result = train_step(parts, micro, int((labels != IGNORED).sum()))
        seen["losses"].append(result.loss)
        seen["norms"].append(result.gradient_norm)
    seen["weights"] = {local(parameter).dtype for parameter in parts.parameters.values()}
    seen["optimizer"] = {value.dtype for value in state_of(parts)["optimizer"].values() if value.dim()}
    return seen


def case(precision: str, stage: int, **changes: Any) -> Case:
    base = {"parallel__data": 2, "parallel__zero_stage": stage, "training__micro_batch_size": 4}
    recipe = Recipe(optimizer="adamw", lr=2e-2, clip=1.0)
    name = f"{precision} ZeRO-{stage}" + (", pipeline" if "parallel__pipeline" in changes else "")
    return Case(name, {**base, "training__precision": precision, **changes}, "none", recipe)


TYPES = {
    # weights and optimizer, compute, gradients
    "fp32": (torch.float32, torch.float32, torch.float32),
    "bf16_mixed": (torch.float32, torch.bfloat16, torch.float32),
    "bf16_pure": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16_mixed": (torch.float32, torch.float16, torch.float32),
}
CASES = [case(precision, stage) for precision in TYPES for stage in (0, 2, 3)]
CASES.append(case("bf16_mixed", 2, parallel__pipeline=2, parallel__data=1, training__micro_batch_size=4))


@pytest.fixture(scope="module")
def seen() -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank saw."""
    by_rank = on_ranks(2, observe, CASES)
    return {one.name: [ranks[index] for ranks in by_rank] for index, one in enumerate(CASES)}


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_every_tensor_has_the_type_that_the_precision_promises(
    one: Case, seen: dict[str, list[dict[str, Any]]]
) -> None:
    kept, compute, gradients = TYPES[one.name.split()[0]]
    for rank in seen[one.name]:
        assert rank["weights"] == {kept}
        assert rank["optimizer"] == {kept}
        assert rank["compute"] == compute
        assert rank["gradients"] == {gradients}


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_every_precision_learns_what_fp32_learns_within_its_own_rounding(
    one: Case, seen: dict[str, list[dict[str, Any]]]
) -> None:
    losses = seen[one.name][0]["losses"]
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(seen["fp32 ZeRO-0"][0]["losses"], rel=0.03)
    assert seen[one.name][0]["norms"] == seen[one.name][1]["norms"]


def overflow(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Steps from a loss scale that is far too large: what each rank decided, and its weights' sum."""
    found = []
    for one in cases:
        plan = one.plan()
        parts = build(plan, build_mesh(plan.parallel, "cpu"), torch.device("cpu"))
        assert parts.loss_scale is not None
        parts.loss_scale.scale.fill_(2.0**40)
        before = sum(local(p).double().sum().item() for p in parts.parameters.values())
        inputs, labels = batches(one)[0]
        own = inputs.shape[0] // parts.mesh.data_ranks
        rows = slice(parts.mesh.data_rank * own, (parts.mesh.data_rank + 1) * own)
        size = plan.config.training.micro_batch_size
        micro = [MicroBatch(*pair) for pair in zip(inputs[rows].split(size), labels[rows].split(size), strict=True)]
        result = train_step(parts, micro, labels.numel())
        after = sum(local(p).double().sum().item() for p in parts.parameters.values())
        found.append({"result": result, "scale": parts.loss_scale.value, "unchanged": before == after})
    return found


def test_an_overflow_of_fp16_is_skipped_by_all_ranks_together_and_halves_the_scale() -> None:
    plans = [case("fp16_mixed", 0), case("fp16_mixed", 3)]
    plans.append(case("fp16_mixed", 2, parallel__pipeline=2, parallel__data=1, training__micro_batch_size=4))
    for found in on_ranks(2, overflow, plans):
        for one in found:
            assert one["result"].overflowed
            assert not one["result"].applied
            assert one["unchanged"]
            assert one["scale"] == 2.0**39


def test_the_loss_scale_grows_after_enough_good_steps_and_stops_helping_at_its_smallest() -> None:
    scale = LossScale()
    for _ in range(STEPS_UNTIL_GROWTH):
        scale.after(overflowed=False)
    assert scale.value == 2 * FIRST_SCALE
    while scale.helps:
        scale.after(overflowed=True)
    assert scale.value == SMALLEST_SCALE


@pytest.mark.slow
def test_compiled_blocks_learn_the_same() -> None:
    plain = case("fp32", 3)
    compiled = case("fp32", 3, training__compile=True, training__activation_checkpointing="selective")
    found = on_ranks(2, observe, [plain, compiled])[0]
    assert found[1]["losses"] == pytest.approx(found[0]["losses"], abs=1e-4)
