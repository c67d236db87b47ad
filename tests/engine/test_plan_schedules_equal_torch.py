"""The planner's action lists are those that torch's own schedules run, action by action."""

from __future__ import annotations

from typing import Any

import pytest

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

from orchestrator.plan.schedules import Shape, action_lists  # noqa: E402

pytestmark = pytest.mark.torch


def _flat(actions: list[Any]) -> list[str]:
    """torch's actions as text, without idle slots, overlapped pairs one after the other."""
    flat: list[str] = []
    for action in actions:
        if action is not None:
            flat.extend(str(sub) for sub in action.sub_actions or (action,))
    return flat


def _interleaving(cls: Any, pipeline: int, virtual: int, micro_batches: int) -> dict[int, list[str]]:
    schedule = object.__new__(cls)
    schedule.pp_group_size, schedule.n_local_stages = pipeline, virtual
    schedule._n_microbatches, schedule._num_stages, schedule.num_stages = micro_batches, *(pipeline * virtual,) * 2
    schedule.number_of_rounds = max(1, micro_batches // pipeline)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    return {rank: _flat(schedule._calculate_single_rank_operations(rank)) for rank in range(pipeline)}


class _RecordingStage:
    """Stands where a pipeline stage stands and writes down what the schedule asks of it."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.log = index, stages, []
        self.is_first, self.is_last, self.has_backward, self.chunks = index == 0, index == stages - 1, True, None

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.log.append(f"{self.stage_index}F{number}")

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.log.append(f"{self.stage_index}B{number}")

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_ops"):
            return lambda *_: []
        if name == "perform_reduce_grad":
            return lambda *_: None
        raise AttributeError(name)


def _executed(cls: Any, pipeline: int, micro_batches: int) -> dict[int, list[str]]:
    """What GPipe and 1F1B really execute: torch's listing of 1F1B is for display and differs from what it runs."""
    lists = {}
    for rank in range(pipeline):
        schedule, stage = object.__new__(cls), _RecordingStage(rank, pipeline)
        schedule._stage, schedule._num_stages, schedule._n_microbatches = stage, pipeline, micro_batches
        schedule._has_backward, schedule.scale_grads = True, False
        for method in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(schedule, method, lambda *_, **__: None)
        schedule._check_inputs = lambda *_, **__: ([()] * micro_batches, [{}] * micro_batches)
        schedule._step_microbatches()
        lists[rank] = stage.log
    return lists


def _ours(schedule: str, pipeline: int, virtual: int, micro_batches: int) -> dict[int, list[str]]:
    lists = action_lists(Shape(schedule, pipeline, virtual, micro_batches))
    return {rank: [str(action) for action in actions] for rank, actions in enumerate(lists)}


@pytest.mark.parametrize("pipeline", range(1, 9))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_single_stage_lists_equal_what_torch_executes(name: str, pipeline: int) -> None:
    cls = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}[name]
    for micro_batches in range(pipeline, 4 * pipeline + 2):
        assert _ours(name, pipeline, 1, micro_batches) == _executed(cls, pipeline, micro_batches)


@pytest.mark.parametrize("pipeline", range(2, 9))
@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_interleaved_lists_equal_torch(name: str, pipeline: int) -> None:
    cls = {
        "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    }[name]
    counts = [count for count in range(1, 4 * pipeline + 1) if count % max(1, count // pipeline) == 0]
    for micro_batches in counts:
        for virtual in (1, 2, 3, 5):
            theirs = _interleaving(cls, pipeline, virtual, micro_batches)
            assert _ours(name, pipeline, virtual, micro_batches) == theirs


@pytest.mark.parametrize("pipeline", range(2, 9))
@pytest.mark.parametrize("name", ["zbv_zero_bubble", "dualpipev"])
def test_v_shaped_lists_equal_torch(name: str, pipeline: int) -> None:
    cls = {"zbv_zero_bubble": torch_schedules.ScheduleZBVZeroBubble, "dualpipev": torch_schedules.ScheduleDualPipeV}[
        name
    ]
    fewest = 1 if name == "zbv_zero_bubble" else 2 * pipeline
    for micro_batches in range(fewest, 4 * pipeline + 2):
        assert _ours(name, pipeline, 2, micro_batches) == _interleaving(cls, pipeline, 2, micro_batches)
