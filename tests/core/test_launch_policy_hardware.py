"""What is said when the hardware is not there; no GPU, no Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.launch.hardware import Gpu, _check_held, check_gpus, check_hardware, visible_gpus
from orchestrator.launch.probe import GpuUse
from tests.launch.plans import cpu_plan, cuda_plan

A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * 2**30, "GPU-abc")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_missing_gpus_are_named_with_what_is_there_and_the_command_that_shows_the_plan():
    (problem,) = check_gpus(cuda_plan(gpus=8), "no NVIDIA driver answers (Driver Not Loaded)")
    assert "8 x A100-80GB needed" in problem.message
    assert "this machine has none: no NVIDIA driver answers" in problem.message
    assert "python -m orchestrator plan +experiment=quickstart" in problem.fix


def test_too_few_gpus_are_counted_by_kind():
    (problem,) = check_gpus(cuda_plan(gpus=8), (A100, A100, Gpu("Tesla T4", 16 * 2**30)))
    assert "this machine has 2 x NVIDIA A100-SXM4-80GB (80 GiB), 1 x Tesla T4 (16 GiB)" in problem.message


def test_enough_gpus_are_no_problem():
    assert check_gpus(cuda_plan(gpus=8), (A100,) * 8) == ()


def test_gpus_with_less_memory_than_the_plan_counts_on_are_a_problem():
    (problem,) = check_gpus(cuda_plan(gpus=1), (Gpu("Tesla T4", 16 * 2**30),))
    assert problem.key == "cluster.gpu"
    assert "counts on 79.2 GiB" in problem.message


def test_gpus_of_several_nodes_are_not_on_this_machine():
    (problem,) = check_gpus(cuda_plan(gpus=8, nodes=2), (A100,) * 16)
    assert "16 x A100-80GB needed on 2 nodes" in problem.message


@pytest.mark.parametrize(
    ("setting", "visible"),
    [(None, 4), ("", 0), ("0,2", 2), ("1", 1), ("7", 0), ("0,9,1", 1), ("GPU-ab,GPU-xy", 1), ("-1", 0)],
)
def test_only_visible_gpus_are_counted(setting, visible):
    assert len(visible_gpus((A100,) * 4, setting)) == visible


def test_cpu_processes_on_this_machine_are_no_problem():
    assert check_hardware(cpu_plan(slots=4)) == ()


def test_cpu_processes_on_several_nodes_need_a_cluster():
    (problem,) = check_hardware(cpu_plan(nodes=2, slots=2))
    assert problem.key == "cluster.nodes"
    assert "4 CPU processes on 2 nodes of 2 are needed" in problem.message
    assert "RAY_ADDRESS" in problem.fix


GIB = 2**30
MINE = (Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB, "GPU-a"), Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB, "GPU-b"))


def use(index: int, uuid: str, used: int) -> GpuUse:
    return GpuUse(index, "NVIDIA A100-SXM4-80GB", 80 * GIB, used, ((4711, "python", used),) if used else (), uuid)


@pytest.mark.parametrize(
    ("uses", "refused", "warned"),
    [
        ([use(0, "GPU-a", 0), use(1, "GPU-b", 0)], "", ""),
        ([use(0, "GPU-a", 0), use(1, "GPU-b", 70 * GIB)], "GPU 1 has 70.0 GiB in use by python (process 4711", ""),
        ([use(0, "GPU-a", 0), use(1, "GPU-b", 3 * GIB)], "", "GPU 1 has 3.0 GiB in use by python (process 4711"),
        ([use(0, "GPU-a", 0), use(1, "GPU-b", 0), use(2, "GPU-hidden", 79 * GIB)], "", ""),
    ],
    ids=["free", "full", "beside", "not visible"],
)
def test_gpus_of_this_machine_that_others_hold_are_named(uses: list[GpuUse], refused: str, warned: str) -> None:
    plan = cuda_plan(nodes=1, gpus=2)
    assert plan.memory is not None
    plan = replace(plan, memory=replace(plan.memory, peak_bytes=40 * GIB))
    warnings: list[str] = []
    problems = _check_held(plan, MINE, uses, warnings.append)
    assert [refused in problem.message for problem in problems] == [True] * bool(refused)
    assert [warned in warning for warning in warnings] == [True] * bool(warned)
    assert all("CUDA_VISIBLE_DEVICES" in problem.fix for problem in problems)
