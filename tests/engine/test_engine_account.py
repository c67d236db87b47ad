"""What the engine really holds and sends, counted, at accumulation 4: against what each stage promises and the planner
says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestrator.engine.account import Account
from orchestrator.plan.run_plan import RunPlan
from tests.engine.gloo import on_ranks
from tests.engine.parity import Case, batches
from tests.engine.reference import IGNORED, Recipe

pytestmark = pytest.mark.torch

ADAM = Recipe(optimizer="adamw", lr=1e-3)


def count(rank: int, world: int, cases: list[Case]) -> list[tuple[Account, dict[str, int]]]:
    """For every case the account of a whole step, and the bytes held just before the optimizer's step."""
    return [_count(case) for case in cases]


def _count(case: Case) -> tuple[Account, dict[str, int]]:
    from orchestrator.engine.account import account
    from orchestrator.engine.build import build
    from orchestrator.engine.mesh import build_mesh
    from orchestrator.engine.step import MicroBatch, train_step

    plan = case.plan()
    mesh = build_mesh(plan.parallel, "cpu")
    parts = build(plan, mesh, torch.device("cpu"))
    size = plan.config.training.micro_batch_size
    held: dict[str, int] = {}
    watching: list[Any] = []

    def look(*_: Any) -> None:
        if watching:
            held.update(watching[0].by_category())

    parts.optimizer.register_step_pre_hook(look)
    inputs, labels = batches(case)[0]
    own = inputs.shape[0] // mesh.data_ranks
    rows = slice(mesh.data_rank * own, (mesh.data_rank + 1) * own)
    micro = [MicroBatch(*pair) for pair in zip(inputs[rows].split(size), labels[rows].split(size), strict=True)]
    tokens = int((labels != IGNORED).sum())
    train_step(parts, micro, tokens)
    with account(parts) as found:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        watching.append(_get_current_dispatch_mode())
        train_step(parts, micro, tokens)
    return found, held


def case(stage: int, **changes: Any) -> Case:
    base = {
        "parallel__data": 2,
        "parallel__zero_stage": stage,
        "training__micro_batch_size": 1,
        "training__global_batch_size": 8,
        "model__hidden_size": 64,
        "model__intermediate_size": 128,
        "model__num_hidden_layers": 4,
    }
    return Case(f"ZeRO-{stage}", {**base, **changes}, "none", ADAM)


CASES = {stage: case(stage) for stage in range(4)}


@pytest.fixture(scope="module")
def counted() -> dict[int, tuple[Account, dict[str, int], RunPlan]]:
    """By ZeRO stage, what rank 0 counted, and the plan."""
    found = on_ranks(2, count, list(CASES.values()))[0]
    return {stage: (*found[index], CASES[stage].plan()) for index, stage in enumerate(CASES)}


@pytest.mark.parametrize("stage", CASES)
def test_states_are_what_the_planner_says_to_the_byte(
    stage: int, counted: dict[int, tuple[Account, dict[str, int], RunPlan]]
) -> None:
    _, held, plan = counted[stage]
    assert plan.memory is not None
    (wanted,) = plan.memory.pipeline_ranks
    assert held["parameters"] == wanted.parameters_bytes
    # Not `gradients_bytes`: at the fullest moment of stage 0 they lie in the buffers of their sum. In stage 1 they are
    # whole until the last micro-batch, and cut over the two ranks once they are reduced.
    gradients = wanted.persistent_bytes - wanted.parameters_bytes - wanted.optimizer_bytes
    assert held["gradients"] * (2 if stage == 1 else 1) == gradients
    # The optimizer also counts its steps: four bytes a parameter tensor.
    tensors = 4 * 9 + 3
    assert held["optimizer"] - 4 * tensors == wanted.optimizer_bytes


@pytest.mark.parametrize("stage", CASES)
def test_collectives_are_what_the_planner_says(
    stage: int, counted: dict[int, tuple[Account, dict[str, int], RunPlan]]
) -> None:
    found, _, plan = counted[stage]
    data = [calls for (axis, _), calls in found.collectives.items() if axis in ("data", "all")]
    assert sum(calls.calls for calls in data) == plan.traffic.data.calls
    assert sum(calls.input_bytes for calls in data) == pytest.approx(plan.traffic.data.bytes, rel=0.02)


PROMISED = {0: (True, True), 1: (True, True), 2: (True, False), 3: (False, False)}
"""By stage: whether weights, and whether gradients, are whole between two micro-batches."""


@pytest.mark.parametrize("stage", CASES)
def test_each_stage_gathers_and_reduces_as_often_as_its_name_promises(
    stage: int, counted: dict[int, tuple[Account, dict[str, int], RunPlan]]
) -> None:
    found = counted[stage][0].collectives
    calls = {kind: calls.calls for (axis, kind), calls in found.items() if axis == "data"}
    units, micro_batches = 4 + 2, 4
    weights_whole, gradients_whole = PROMISED[stage]
    if stage > 0:
        assert calls["all_gather"] == (units if weights_whole else 2 * units * micro_batches)
        assert calls["reduce_scatter"] == (units if gradients_whole else units * micro_batches)
    else:
        assert "all_gather" not in calls


@pytest.mark.parametrize("stage", CASES)
def test_a_step_leaves_nothing_behind_but_weights_and_optimizer(
    stage: int, counted: dict[int, tuple[Account, dict[str, int], RunPlan]]
) -> None:
    found = counted[stage][0]
    assert found.end["parameters"] == found.start["parameters"]
    assert found.end["optimizer"] == found.start["optimizer"]
    assert found.end["gradients"] == found.end["gathered"] == 0
    assert found.peak_bytes > sum(found.end.values())


def test_what_is_cut_is_not_held_at_the_peak(counted: dict[int, tuple[Account, dict[str, int], RunPlan]]) -> None:
    peaks = [counted[stage][0].peak_bytes for stage in CASES]
    assert peaks[0] > max(peaks[1:])
    assert peaks[3] < 0.9 * min(peaks[1:3])
