"""Nodes that would spoil a run are named before it starts, like ones together, each with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.compose import load_config
from orchestrator.launch.node_check import Driver, judge, read_paths, written_folders
from orchestrator.launch.probe import GpuUse, NodeFacts, own_facts
from orchestrator.placement.topology import Node

GIB = 2**30
VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cu128", "nvidia-nccl-cu12": "2.27.5"}
GOOD = NodeFacts(VERSIONS, "abc", "/opt/orchestrator", 64 * GIB, 16, (), {"/shared/probe": True, "/data": True})
DRIVER = Driver(
    {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0"},
    codes={"abc"},
    paths={"/data": "data.path"},
    fresh={"/shared/probe": "run.directory"},
    gpu_bytes=60 * GIB,
)


def nodes(count: int, free: int = 2) -> list[Node]:
    return [Node(f"id{number}", f"host{number}", 2, free) for number in range(count)]


def said(*answers: NodeFacts | str, free: int = 2, driver: Driver = DRIVER) -> tuple[list[str], list[str]]:
    found, warnings = judge(nodes(len(answers), free), {f"id{n}": answer for n, answer in enumerate(answers)}, driver)
    assert all(problem.fix for problem in found)
    return [f"{problem.key}: {problem.message} -> {problem.fix}" for problem in found], warnings


def versions(**changed: str | None) -> Mapping[str, str]:
    values = {**VERSIONS, **{name.replace("_", "-"): value for name, value in changed.items()}}
    return {name: value for name, value in values.items() if value is not None}


def test_good_nodes_have_nothing_said_of_them() -> None:
    assert said(GOOD, GOOD) == ([], [])


def test_a_driver_without_gpus_may_have_another_build_of_torch() -> None:
    driver = replace(DRIVER, versions={**DRIVER.versions, "torch": "2.13.0+cpu"})
    assert said(GOOD, driver=driver) == ([], [])


@pytest.mark.parametrize(
    ("bad", "message", "fix"),
    [
        ("the worker died", "node host1 cannot run a task: the worker died", "cluster.require_labels"),
        (
            replace(GOOD, code="", code_place="there is no package `orchestrator`"),
            "this package is missing on node host1: there is no package `orchestrator`",
            "submit",
        ),
        (replace(GOOD, code="old", code_place="/old/orchestrator"), "host1 would run other code", "one image"),
        (replace(GOOD, versions=versions(torch="2.12.1")), "torch is 2.12.1 on node host1 and 2.13.0 here", "image"),
        (replace(GOOD, versions=versions(python="3.12.1")), "python is 3.12.1 on node host1", "constraints"),
        (
            replace(GOOD, versions=versions(torch="2.13.0+cu130")),
            "torch is 2.13.0+cu130 on node host1 and 2.13.0+cu128 on the others",
            "one environment",
        ),
        (replace(GOOD, versions=versions(nvidia_nccl_cu12="2.26.0")), "nvidia-nccl-cu12 is 2.26.0 on", "image"),
        (replace(GOOD, sees={"/shared/probe": False, "/data": True}), "is not seen on node host1", "same path"),
        (
            replace(GOOD, sees={"/shared/probe": True, "/data": False}),
            "data.path: /data does not exist on node host1",
            "same path",
        ),
    ],
    ids=["silent", "no package", "other code", "torch", "python", "build", "nccl", "not shared", "no data"],
)
def test_a_bad_node_is_named_with_the_reason_and_the_remedy(bad: NodeFacts | str, message: str, fix: str) -> None:
    (problem,), warnings = said(GOOD, bad, GOOD)
    assert message in problem
    assert fix in problem.partition("->")[2]
    assert warnings == []


def test_nodes_with_one_fault_are_one_problem_and_many_are_counted() -> None:
    old = replace(GOOD, versions=versions(torch="2.12.1"))
    (problem,), _ = said(GOOD, *[old] * 6)
    assert "6 nodes (host1, host2, host3, host4 and 2 more)" in problem


def test_all_faults_are_said_at_once() -> None:
    bad = replace(GOOD, code="old", versions=versions(torch="2.12.1"), sees={})
    problems, _ = said(GOOD, bad)
    assert len(problems) == 4


def gpus(*used: float, holders: bool = True) -> tuple[GpuUse, ...]:
    return tuple(
        GpuUse(i, "A100", 80 * GIB, int(u * GIB), ((4711, "python", int(u * GIB)),) if u and holders else ())
        for i, u in enumerate(used)
    )


def test_a_gpu_that_a_process_unknown_to_ray_holds_is_named() -> None:
    (problem,), _ = said(replace(GOOD, gpus=gpus(0, 40)))
    assert "Ray counts 2 GPUs as free, but GPU 1 has 40.0 GiB in use by python (process 4711, 40.0 GiB)" in problem
    assert "CUDA_VISIBLE_DEVICES" in problem


def test_gpus_that_ray_s_own_jobs_hold_are_not_held_against_the_node() -> None:
    assert said(replace(GOOD, gpus=gpus(0, 40)), free=1) == ([], [])


def test_a_gpu_with_room_enough_beside_another_process_is_a_warning() -> None:
    problems, (warning,) = said(replace(GOOD, gpus=gpus(0, 2)))
    assert problems == []
    assert "GPU 1 has 2.0 GiB in use" in warning


def test_memory_in_use_by_nobody_that_can_be_seen_counts_as_well() -> None:
    (problem,), _ = said(replace(GOOD, gpus=gpus(0, 40, holders=False)))
    assert "GPU 1 has 40.0 GiB in use" in problem


def test_a_run_without_gpus_does_not_look_at_them() -> None:
    assert said(replace(GOOD, gpus=gpus(70, 70)), driver=replace(DRIVER, gpu_bytes=None)) == ([], [])


def test_the_folders_are_those_that_all_nodes_write_below_and_object_stores_are_none(tmp_path: Path) -> None:
    config = load_config([f"run.directory={tmp_path}/new/runs", "checkpoint.directory=s3://bucket/runs"])
    assert written_folders(config) == {"run.directory": tmp_path}


def test_the_paths_are_those_that_every_node_reads(tmp_path: Path) -> None:
    words = ["data=text", f"data.path={tmp_path}", "data.tokenizer=/shared/tokenizer.json", "model=smollm2_135m"]
    assert read_paths(load_config(words)) == {str(tmp_path): "data.path", "/shared/tokenizer.json": "data.tokenizer"}
    assert read_paths(load_config([])) == {}


def test_the_checkpoint_that_a_run_begins_with_is_read_on_every_node_and_one_in_a_store_is_not_looked_for() -> None:
    words = ["checkpoint.init_from=/shared/imported/step-00000000", "checkpoint.resume=/shared/old/step-00000100"]
    assert read_paths(load_config(words)) == {
        "/shared/imported/step-00000000": "checkpoint.init_from",
        "/shared/old/step-00000100": "checkpoint.resume",
    }
    assert read_paths(load_config(["checkpoint.init_from=s3://bucket/imported/step-00000000"])) == {}


def test_of_a_pattern_the_folder_above_it_is_looked_for() -> None:
    words = ["data=text", "data.path='/shared/texts/part-*/[a-f]*.txt'", "data.tokenizer=bytes"]
    assert read_paths(load_config(words)) == {"/shared/texts": "data.path"}


def test_this_process_finds_the_package_it_runs() -> None:
    facts = own_facts()
    assert facts.code
    assert Path(facts.code_place).name == "orchestrator"
    assert facts.versions["python"].count(".") == 2
