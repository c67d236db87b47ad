"""What a rank does about steps that are not applied, and about ranks that do not reach each other."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.config.schema import FaultToleranceConfig
from orchestrator.engine.anomaly import WINDOW, LossWatch, NotFiniteError, watch_losses
from orchestrator.engine.pace import OwnWork
from orchestrator.engine.reach import UnreachableError, check_groups
from orchestrator.engine.step import StepResult
from orchestrator.launch.report import classify
from orchestrator.tracking.metrics_log import MetricsLog, read_records
from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.gloo import RanksFailedError, live, on_ranks

pytestmark = pytest.mark.torch

NAN = StepResult(loss=math.nan, gradient_norm=math.nan, applied=False)
SPIKE = StepResult(loss=9.0, gradient_norm=1.0, applied=False)


def watch(**keys: Any) -> LossWatch:
    return LossWatch(FaultToleranceConfig(**keys))


def good(loss: float) -> StepResult:
    return StepResult(loss=loss, gradient_norm=1.0, applied=True)


def test_without_a_factor_no_loss_is_too_large() -> None:
    seen = watch()
    for step in range(1, 20):
        seen.judge(step, good(1.0), None)
    assert seen.limit(20) == math.inf


def test_a_spike_is_measured_against_the_median_of_the_latest_steps_once_there_are_enough() -> None:
    seen = watch(spike_factor=3)
    limits = []
    for step, loss in enumerate([4.0, 1.0, 1.0, 2.0, 2.0, 2.0, 5.0, 2.0, 2.0], start=1):
        limits.append(seen.limit(step))
        seen.judge(step, good(loss), None)
    assert limits == [math.inf] * 8 + [6.0]


def test_a_spike_ends_the_run_with_the_arithmetic() -> None:
    seen = watch(spike_factor=3)
    seen.recent.extend([2.0] * 8)
    with pytest.raises(NotFiniteError, match=r"Step 9 gave loss 9.0 .* above 6 = fault_tolerance.spike_factor=3 times"):
        seen.judge(9, SPIKE, 5)


@pytest.mark.parametrize(("on_nan", "words"), [("stop", "ends the run"), ("rewind", "leaves the step out")])
def test_what_follows_a_step_that_is_no_number_is_said(on_nan: str, words: str) -> None:
    with pytest.raises(NotFiniteError, match=words) as caught:
        watch(on_nan=on_nan).judge(7, NAN, 5)
    assert "the checkpoint of step 5" in str(caught.value)
    assert classify(caught.value) == "nan"


def test_steps_may_be_skipped_but_not_without_end() -> None:
    seen = watch(on_nan="skip", max_skipped_steps=2)
    seen.judge(1, NAN, None)
    seen.judge(2, NAN, None)
    seen.judge(3, good(1.0), None)
    seen.judge(4, NAN, None)
    seen.judge(5, NAN, None)
    with pytest.raises(NotFiniteError, match="number 3 in a row, more than"):
        seen.judge(6, NAN, None)


def test_an_overflow_of_the_loss_scale_is_no_anomaly() -> None:
    watch(max_skipped_steps=0).judge(1, replace(NAN, overflowed=True), None)


def test_a_step_that_is_left_out_is_never_applied_and_never_judged() -> None:
    seen = LossWatch(FaultToleranceConfig(), left_out=(7,))
    assert seen.limit(7) == -math.inf
    seen.judge(7, SPIKE, 5)


def test_a_left_out_step_changes_no_weight_and_is_marked_in_the_record(tmp_path: Path) -> None:
    plan = tiny_plan(training__steps=6, optimizer__lr=1e-2, parallel__data=2)
    live(tasks_of(plan, tmp_path / "whole"))
    live([replace(task, left_out=(3,)) for task in tasks_of(plan, tmp_path / "without")])
    whole = list(read_records(tmp_path / "whole" / "metrics.jsonl"))
    without = list(read_records(tmp_path / "without" / "metrics.jsonl"))
    assert [record.get("skipped", False) for record in without] == [False, False, True, False, False, False]
    assert [record["loss"] for record in without[:3]] == [record["loss"] for record in whole[:3]]
    assert without[3]["loss"] != whole[3]["loss"]
    assert [record["samples"] for record in without] == [record["samples"] for record in whole]


def _remembers(rank: int, world: int, folder: str) -> list[float]:
    log = MetricsLog(Path(folder) / "metrics.jsonl") if rank == 0 else None
    return list(watch_losses(FaultToleranceConfig(spike_factor=2), (), log).recent)


def test_after_a_restart_all_ranks_know_the_losses_of_the_record(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        log.append({"step": step, "loss": float(step), **({"skipped": True} if step == 40 else {})})
    log.close()
    first, second = on_ranks(2, _remembers, str(tmp_path))
    assert first == second == [float(step) for step in range(8, 40)]


def _one_stays_away(rank: int, world: int, degrees: dict[str, int]) -> str:
    import torch
    import torch.distributed as dist

    from orchestrator.engine.mesh import build_mesh

    mesh = build_mesh(tiny_plan(**degrees).parallel, "cpu")
    store = dist.distributed_c10d._get_default_store()
    if rank == world - 1:
        store.wait(["tried"])  # it is here, and does not take part
        store.set("seen", "")
        return ""
    try:
        check_groups(mesh, torch.device("cpu"), 1.0)
    except UnreachableError as error:
        return str(error)
    finally:
        store.set("tried", "")
        store.wait(["seen"])  # the store ends with this rank
    return "nothing was noticed"


def test_a_rank_that_does_not_answer_is_found_out_before_the_first_step_with_its_group_and_the_variables() -> None:
    said, _ = on_ranks(2, _one_stays_away, {"parallel__data": 2})
    assert "an all-reduce over all ranks (ranks 0, 1; cpu) was not done after 1 s" in said
    assert "GLOO_SOCKET_IFNAME=(not set)" in said
    assert "lo 127.0.0.1" in said


def _all_take_part(rank: int, world: int) -> bool:
    import torch

    from orchestrator.engine.mesh import build_mesh

    check_groups(build_mesh(tiny_plan(parallel__data=2, parallel__tensor=2).parallel, "cpu"), torch.device("cpu"), 30.0)
    return True


def test_groups_that_answer_are_no_problem() -> None:
    assert on_ranks(4, _all_take_part) == [True] * 4


def test_an_interface_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    tasks = tasks_of(tiny_plan(parallel__data=2, fault_tolerance__network_timeout_seconds=5), tmp_path)
    tasks = [replace(task, environment={**task.environment, "GLOO_SOCKET_IFNAME": "nosuch0"}) for task in tasks]
    with pytest.raises(RanksFailedError) as caught:
        live(tasks)
    said = caught.value.failures[0]
    assert "did not connect to all of the 2 ranks" in said
    assert "GLOO_SOCKET_IFNAME=nosuch0" in said
    assert "Set GLOO_SOCKET_IFNAME" in said


@pytest.mark.parametrize(
    ("degrees", "forward", "update"),
    [
        ({"parallel__data": 2}, True, True),
        ({"parallel__data": 2, "parallel__zero_stage": 1}, False, False),
        ({"parallel__data": 2, "parallel__zero_stage": 3}, False, True),
        ({"parallel__data": 1, "parallel__tensor": 2}, False, True),
    ],
)
def test_only_what_waits_for_nobody_counts_as_a_ranks_own_work(
    degrees: dict[str, Any], forward: bool, update: bool
) -> None:
    own = OwnWork(torch.device("cpu"), tiny_plan(**degrees).parallel)
    assert (own.forward_is_own, own.update_is_own) == (forward, update)


def test_a_rank_beats_at_the_end_of_each_part_of_its_own_work() -> None:
    own = OwnWork(torch.device("cpu"), tiny_plan().parallel)
    beats = []
    own.beat = lambda: beats.append(1)
    with own.counted():
        pass
    with own.counted(when=False):
        assert len(beats) == 1
    assert len(beats) == 2
    assert own.take() > 0
    assert own.take() == 0


def test_a_spike_is_skipped_by_all_ranks_alike_and_the_record_shows_why(tmp_path: Path) -> None:
    """A factor so small that ordinary noise counts: whichever steps it hits, the record alone tells which they are."""
    faults = {"fault_tolerance__spike_factor": 1.0005, "fault_tolerance__on_nan": "skip"}
    plan = tiny_plan(training__steps=30, optimizer__lr=1e-4, parallel__data=2, **faults)
    live(tasks_of(plan, tmp_path))
    applied: list[float] = []
    skipped = 0
    for record in read_records(tmp_path / "metrics.jsonl"):
        known = applied[-WINDOW:]
        too_large = len(known) >= 8 and record["loss"] > 1.0005 * statistics.median(known)
        assert record.get("skipped", False) == too_large, record["step"]
        skipped += too_large
        if not too_large:
            applied.append(record["loss"])
    assert 0 < skipped < 22
