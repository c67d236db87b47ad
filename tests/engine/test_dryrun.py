"""The dry run: the same step on tensors without numbers, held against real steps, known figures and the planner."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from orchestrator.engine import dryrun, step
from orchestrator.engine.account import Account, Watch
from orchestrator.engine.dryrun import SimulatedRank, plain, simulate
from orchestrator.plan.dryrun_problems import problems_of
from orchestrator.plan.dryrun_report import report
from orchestrator.plan.make import make_plan
from orchestrator.plan.planned_rank import CATEGORIES
from orchestrator.plan.roles import extended, roles_of
from orchestrator.plan.run_plan import RunPlan
from tests.benchmarks.dryrun_planner import BLOCKS, FP32, GPT, MEDIAN, NARROW, WORST, Case, compare
from tests.core import plan_cases
from tests.engine import plain_pipeline
from tests.engine.cases import tiny_plan
from tests.engine.gloo import on_ranks

pytestmark = pytest.mark.torch

MIB = 2**20
REAL: dict[str, dict[str, Any]] = {
    "replicated": {"parallel__data": 2},
    "ZeRO-1, accumulating": {"parallel__data": 2, "parallel__zero_stage": 1, "training__micro_batch_size": 1},
    "ZeRO-2, full recompute": {
        "parallel__data": 2,
        "parallel__zero_stage": 2,
        "training__activation_checkpointing": "full",
    },
    "ZeRO-3, selective, BF16": {
        "parallel__data": 2,
        "parallel__zero_stage": 3,
        "training__activation_checkpointing": "selective",
        "training__precision": "bf16_mixed",
    },
    "tensor, sequence parallel": {"parallel__tensor": 2, "parallel__sequence_parallel": True},
    "tensor, selective": {"parallel__tensor": 2, "training__activation_checkpointing": "selective"},
    "pipeline": {"parallel__pipeline": 2, "parallel__zero_stage": 1, "parallel__schedule": "1f1b"},
    "pipeline, tied, interleaved": {
        "parallel__pipeline": 2,
        "parallel__schedule": "interleaved_1f1b",
        "parallel__virtual_stages": 2,
        "model__num_hidden_layers": 4,
        "model__tie_word_embeddings": True,
    },
    "gpt": {
        "parallel__data": 2,
        "parallel__zero_stage": 3,
        "model__family": "gpt",
        "model__num_key_value_heads": None,
    },
}
"""Small plans of two ranks that are run for real."""
WIDE = {"model__hidden_size": 64, "model__intermediate_size": 128, "training__sequence_length": 64}


def small_plan(name: str) -> RunPlan:
    return tiny_plan(**(WIDE | REAL[name]))


def count_real(rank: int, world: int) -> list[Account]:
    """The account of a real rank's steady step, for every plan of `REAL`."""
    return [_count_real(small_plan(name)) for name in REAL]


def _count_real(plan: RunPlan) -> Account:
    from orchestrator.engine.build import build
    from orchestrator.engine.dryrun import _batches
    from orchestrator.engine.mesh import build_mesh

    assert plan.parallel is not None
    parts = build(plan, build_mesh(plan.parallel, "cpu"), torch.device("cpu"))
    training = plan.config.training
    shape = (training.micro_batch_size, training.sequence_length)
    batches = _batches(plan.parallel.micro_batches, shape, torch.device("cpu"))
    gc.collect()  # what earlier plans left in cycles would die within the count
    with Watch(parts) as watch:
        step.train_step(parts, batches, 100)
        found = []
        for _ in range(4):  # a transfer that ends late, as on a busy machine, keeps its tensors longer than it need
            watch.begin()
            step.train_step(parts, batches, 100)
            found.append(watch.finish())
        return min(found, key=lambda account: account.peak_bytes)


@pytest.fixture(scope="module")
def counted() -> list[list[Account]]:
    """By rank, the account of each plan of `REAL`."""
    return on_ranks(2, count_real)


@pytest.mark.parametrize("name", REAL)
def test_a_simulated_step_holds_and_sends_what_a_real_one_does(name: str, counted: list[list[Account]]) -> None:
    plan, number = small_plan(name), list(REAL).index(name)
    for rank in range(2):
        real, simulated = counted[rank][number], sound(simulate(plan, rank))
        assert sum(simulated.memory.values()) == pytest.approx(real.peak_bytes, rel=0.01)
        assert simulated.memory["parameters"] == real.peak["parameters"]
        assert simulated.memory["optimizer"] == real.peak["optimizer"]
        assert simulated.flops == real.flops > 0
        sent = {(each["axis"], each["kind"]): (each["calls"], each["bytes"]) for each in simulated.collectives}
        assert sent == {key: (calls.calls, calls.input_bytes) for key, calls in real.collectives.items()}


def sound(simulated: SimulatedRank) -> SimulatedRank:
    assert not simulated.failed_while, simulated.traceback
    return simulated


def total(simulated: SimulatedRank) -> int:
    return sum(sound(simulated).memory.values())


def blocks(**changes: Any) -> RunPlan:
    """LLaMA-7B's width with two blocks on 8 GPUs, ZeRO-2."""
    parallel = {"data": 8, "zero_stage": 2, **changes.pop("parallel", {})}
    return Case("blocks", parallel, changes.pop("batch", 8), model={"num_hidden_layers": 2}, **changes).plan()


def test_a_tensor_of_64_mib_held_through_the_step_is_64_mib_more() -> None:
    """Planted in the step itself, on the device, as a leak would be."""
    plan, accumulate = blocks(), step._accumulate

    def leaking(parts: Any, *args: Any) -> Tensor:
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=parts.device)
        result: Tensor = accumulate(parts, *args)
        del held
        return result

    before = total(simulate(plan, 0))
    with patch.object(step, "_accumulate", leaking):
        assert total(simulate(plan, 0)) - before == 64 * MIB


def test_what_follows_from_two_steps_is_what_the_whole_step_comes_to() -> None:
    for parallel in ({}, {"data": 2, "pipeline": 2, "schedule": "1f1b"}):
        plan = blocks(parallel=parallel, batch=96 if parallel == {} else 24)
        whole = sound(simulate(plan, 0))
        with patch("orchestrator.plan.roles._WHOLE_STEP", 1):
            extended = sound(simulate(plan, 0))
        assert len(whole.micro_batches) == 1 and len(extended.micro_batches) == 2
        assert extended.memory == pytest.approx(whole.memory, abs=1024)
        assert (extended.flops, extended.collectives) == (whole.flops, whole.collectives)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_first_step_of_one_micro_batch_leaves_what_a_whole_one_does(schedule: str, stage: int) -> None:
    parallel = {"data": 2, "tensor": 2, "pipeline": 2, "schedule": schedule, "zero_stage": stage}
    plan = blocks(parallel=parallel, batch=8)
    for rank in (0, 7):
        short = sound(simulate(plan, rank))
        with patch.object(dryrun, "_first_step_of", lambda parts, count: nullcontext(count)):
            whole = sound(simulate(plan, rank))
        for name in ("memory", "between_steps", "collectives", "flops"):
            assert getattr(short, name) == getattr(whole, name), name


@pytest.mark.parametrize("stage, recompute, gib", [
    (3, "full", 15.63),
    pytest.param(3, "none", 37.02, marks=pytest.mark.slow),
    pytest.param(2, "full", 24.77, marks=pytest.mark.slow),
    pytest.param(0, "full", 101.66, marks=pytest.mark.slow),
])  # fmt: skip
def test_plain_fsdp_of_llama_7b_holds_what_is_known_of_it(stage: int, recompute: str, gib: float) -> None:
    """A program of torch alone (each block a unit, whole logits), 8 ranks, one sequence of 4096, BF16 with FP32
    reductions, fused AdamW; the figures were counted with fake tensors and another tracker."""
    from tests.engine.plain_fsdp import peak_bytes

    assert peak_bytes(stage, recompute) / 2**30 == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize("rank, recompute, gib", plain_pipeline.KNOWN)
def test_plain_3d_parallelism_of_llama_70b_holds_what_is_known_of_it(rank: int, recompute: str, gib: float) -> None:
    """Tensor 8 with sequence parallel, pipeline 4 (1F1B, 8 micro-batches), data 4: the figures of 20 blocks a rank from
    steps with 2 and 3. The account counts the same bytes as the tracker that knows nothing of the engine."""
    few, more = plain_pipeline.peaks(rank, recompute, 2, 3)
    for each in (few, more):
        assert sum(each.memory.values()) == each.bytes
    assert extended(few.bytes, more.bytes, (2, 3), plain_pipeline.BLOCKS) / 2**30 == pytest.approx(gib, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("rank, recompute, gib", plain_pipeline.KNOWN)
def test_the_same_holds_of_all_its_blocks(rank: int, recompute: str, gib: float) -> None:
    (whole,) = plain_pipeline.peaks(rank, recompute, plain_pipeline.BLOCKS)
    assert sum(whole.memory.values()) == whole.bytes
    assert whole.bytes / 2**30 == pytest.approx(gib, rel=0.02)


def test_what_the_engine_holds_less_than_plain_torch_is_the_embeddings_gradient() -> None:
    """With stage 1, which keeps gradients whole as torch's pipeline does: torch's style for an embedding leaves its
    gradient whole on every tensor rank, the engine's cuts it."""
    (torchs,) = plain_pipeline.peaks(0, "full", 2)
    ours = sound(simulate(plain_pipeline.declared("full", 2, stage=1), 0)).memory
    for name in ("parameters", "gathered", "optimizer"):
        assert ours[name] == torchs.memory[name]
    table = 32000 * 8192 * 4
    assert torchs.memory["gradients"] - ours["gradients"] == table - table // plain_pipeline.TENSOR


SUBSET = (
    Case("stage 1, selective", {"data": 8, "zero_stage": 1}, 16, "selective", {"num_hidden_layers": 2}),
    Case("stage 3", {"data": 8, "zero_stage": 3}, 8, "none", {"num_hidden_layers": 2}),
    Case(
        "three axes",
        {"data": 2, "tensor": 2, "pipeline": 2, "zero_stage": 2, "sequence_parallel": True},
        8,
        "full",
    ),
    Case(
        "zero bubble",
        {"data": 2, "pipeline": 2, "zero_stage": 1, "schedule": "zbv_zero_bubble", "virtual_stages": 2},
        16,
        "none",
    ),
)


def test_the_planner_is_near_the_simulation_and_exact_in_states() -> None:
    """The whole table: `python -m tests.benchmarks.dryrun_planner`."""
    found = [rank for case in SUBSET for rank in compare(case)]
    errors = sorted(abs(rank.off) for rank in found)
    assert all(rank.exact for rank in found)
    assert errors[len(errors) // 2] < MEDIAN and errors[-1] < WORST, [(rank.name, rank.off) for rank in found]


TWO_STAGES = {"data": 2, "pipeline": 2, "zero_stage": 1, "virtual_stages": 2}
EACH = (
    Case("stage 1, selective", {"data": 8, "zero_stage": 1}, 16, "selective", {"num_hidden_layers": 2}),
    Case("stage 2, full", {"data": 8, "zero_stage": 2}, 32, "full", {"num_hidden_layers": 2}),
    Case("two micro-batches", {"data": 8, "zero_stage": 2}, 16, "full", {"num_hidden_layers": 2}),
    Case("tensor 4", {"data": 2, "tensor": 4, "zero_stage": 1, "sequence_parallel": True}, 8, "selective"),
    Case("offload, one GPU", {"data": 1, "zero_stage": 3, "offload": "all"}, 4, model={"num_hidden_layers": 2}),
    Case("1F1B", {"data": 2, "pipeline": 2, "zero_stage": 1, "schedule": "1f1b"}, 16, "selective"),
    Case("interleaved zero bubble", {**TWO_STAGES, "schedule": "interleaved_zero_bubble"}, 16, "none"),
    Case("ZB-V", {**TWO_STAGES, "schedule": "zbv_zero_bubble"}, 16, "none"),
    Case("DualPipeV", {**TWO_STAGES, "schedule": "dualpipev"}, 16, "none"),
)
NOISE = 16 * MIB
"""What may be left of a small category: samples, positions, the last tensor sent."""


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH, ids=lambda case: case.name)
def test_each_category_at_the_peak_is_what_the_simulation_holds(case: Case) -> None:
    for rank in compare(case):
        for name in CATEGORIES:
            assert rank.simulated[name] == pytest.approx(rank.planned[name], rel=0.05, abs=NOISE), (rank.rank, name)


@pytest.mark.parametrize("batch, recompute", [(8, "none"), (16, "full")])
def test_on_a_cpu_nothing_is_reduced_or_given_back_before_all_gradients_are_there(batch: int, recompute: str) -> None:
    """At stage 0 the whole model is one unit there, and activations are most of what a small model holds."""
    (rank,) = compare(Case("narrow", {"data": 8}, batch, recompute, NARROW, FP32, device="cpu"))
    assert rank.exact and abs(rank.off) < 0.005
    for name in CATEGORIES:
        assert rank.simulated[name] == pytest.approx(rank.planned[name], abs=4 * MIB), name


THREE_AXES = {"data": 2, "tensor": 2, "pipeline": 2, "zero_stage": 2, "sequence_parallel": True}


@pytest.mark.parametrize("case", [
    # FSDP2 makes a gather that nobody uses in a stage's last backward pass if nothing was in flight there at some time.
    Case("unused", {**TWO_STAGES, "schedule": "interleaved_1f1b"}, 16),
    Case("split", {**TWO_STAGES, "schedule": "zbv_zero_bubble"}, 16, "none"),
    Case("three axes", THREE_AXES, 8),
    Case("positions", THREE_AXES, 8, "none", GPT),
    Case("one axis", {"data": 8, "zero_stage": 1}, 8),
], ids=lambda case: case.name)  # fmt: skip
def test_collectives_of_every_axis_are_planned_to_the_call(case: Case) -> None:
    plan = case.plan()
    role = roles_of(plan)[0]
    (entry,) = report(plan, [(role, plain(simulate(plan, role.rank)))], (), 0.0)["ranks"]
    for axis, found in entry["traffic"].items():
        assert found["simulated_calls"] == found["planned_calls"], axis
        assert abs(found["difference"]) < 1e-6, axis


def test_a_failure_that_the_planner_let_through_names_the_rank_and_what_to_change() -> None:
    """A number of heads that the tensor ranks do not divide, as if the planner's rule for it were missing."""
    with patch("orchestrator.plan.validate.rules.check", lambda facts: ()):
        plan = make_plan(
            plan_cases.config(
                BLOCKS,
                model_changes={"num_attention_heads": 6, "hidden_size": 4096, "head_dim": 128},
                parallel={"data": 2, "tensor": 4},
                training={"global_batch_size": 8},
            )
        )
    role = roles_of(plan)[0]
    simulated = simulate(plan, role.rank)
    (problem,) = problems_of(plan, report(plan, [(role, plain(simulated))], (), 0.0))
    assert problem.key == "parallel.tensor"
    assert problem.message.startswith("Rank 0 (pipeline rank 0) fails while ")
    assert "parallel.tensor=4 does not divide model.num_attention_heads=6" in problem.fix
    assert "Traceback" not in str(problem)


def test_a_rank_of_sixteen_thousand_is_simulated_like_one_of_eight() -> None:
    """Nothing is made for the ranks that are not here."""
    world = {"data": 1024, "tensor": 8, "pipeline": 2, "zero_stage": 1, "sequence_parallel": True}
    plan = Case("large", world, 4096, model={"num_hidden_layers": 2}).plan()
    simulated = sound(simulate(plan, 16383))
    assert simulated.resident_bytes < 2**30
    assert simulated.memory["parameters"] > 0


def test_offload_leaves_no_states_on_the_gpu() -> None:
    plan = blocks(parallel={"data": 1, "zero_stage": 3, "offload": "all"}, batch=2)
    simulated = sound(simulate(plan, 0))
    assert plan.memory is not None
    planned = plan.memory.pipeline_ranks[0]
    assert simulated.memory["parameters"] == simulated.memory["optimizer"] == 0
    assert simulated.host_bytes <= (planned.host_bytes or 0) * 1.001


def test_a_report_holds_every_category_beside_the_planners() -> None:
    plan = blocks()
    (role,) = roles_of(plan)
    told = report(plan, [(role, plain(simulate(plan, role.rank)))], ("one",), 1.0)
    (entry,) = told["ranks"]
    assert set(entry["memory"]) <= {*CATEGORIES, "total"}
    assert entry["memory"]["total"]["simulated_bytes"] == sum(
        values["simulated_bytes"] for name, values in entry["memory"].items() if name != "total"
    )
    assert told["worst"]["rank"] == 0 and told["worst"]["total_bytes"] < told["capacity_bytes"]
    assert abs(entry["flops"]["difference"]) < 1e-9
    assert abs(entry["traffic"]["data"]["difference"]) < 0.01


def test_the_simulation_leaves_the_process_as_it_was() -> None:
    from orchestrator.engine import build

    allocate = build.allocate
    sound(simulate(blocks(), 0))
    assert build.allocate is allocate and not hasattr(torch, "meta")
    assert not torch.distributed.is_initialized()
    assert os.environ.get("RANK") is None
