"""What a rank leaves for whoever looks: traces of a profiler window, and evidence when memory runs out."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from orchestrator.engine.out_of_memory import CATEGORIES, RING_ENTRIES, asked_bytes, is_out_of_memory
from orchestrator.plan.rank_task import RankTask
from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.gloo import TestLink, _start, live

pytestmark = pytest.mark.torch

WINDOW: dict[str, Any] = {
    "parallel__data": 2,
    "training__steps": 6,
    "training__profile_steps": (3, 4),
    "checkpoint__every_steps": 2,
}


def steps_in(trace: Path) -> set[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("step ")}


def profiles(link: TestLink) -> list[dict[str, Any]]:
    return [event for event in link.events if event["kind"] == "profile"]


# The profiler window


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TestLink]]:
    directory = tmp_path_factory.mktemp("profiled")
    return directory, live(tasks_of(tiny_plan(**WINDOW), directory))


def test_the_trace_holds_the_steps_of_the_window_and_no_others(profiled: tuple[Path, list[TestLink]]) -> None:
    directory, links = profiled
    trace = directory / "profile" / "rank-000.json.gz"
    assert steps_in(trace) == {"step 3", "step 4"}
    (event,) = profiles(links[0])
    assert (event["path"], event["first_step"], event["last_step"]) == (str(trace), 3, 4)
    assert "aten::mm" in (directory / "profile" / "rank-000.txt").read_text()


def test_only_the_ranks_that_were_asked_for_write_a_trace(
    profiled: tuple[Path, list[TestLink]], tmp_path: Path
) -> None:
    directory, links = profiled
    assert profiles(links[1]) == []
    assert {path.name for path in (directory / "profile").iterdir()} == {"rank-000.json.gz", "rank-000.txt"}
    both = live(tasks_of(tiny_plan(**WINDOW, training__profile_ranks="all"), tmp_path))
    assert [len(profiles(link)) for link in both] == [1, 1]
    assert steps_in(tmp_path / "profile" / "rank-001.json.gz") == {"step 3", "step 4"}


def test_profiled_steps_are_marked_in_the_record(profiled: tuple[Path, list[TestLink]]) -> None:
    lines = [json.loads(line) for line in (profiled[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("profiled", False) for line in lines] == [False, False, True, True, False, False]


def test_a_run_that_goes_on_inside_the_window_profiles_the_rest_of_it(tmp_path: Path) -> None:
    plan = tiny_plan(**(WINDOW | {"training__profile_steps": (2, 5)}))
    stopped = live(tasks_of(plan, tmp_path), {0: 4})
    trace = tmp_path / "profile" / "rank-000.json.gz"
    assert profiles(stopped[0])[0]["last_step"] == 3
    assert {"step 2", "step 3"} <= steps_in(trace)
    continued = live(tasks_of(plan, tmp_path, attempt=2))
    assert [(event["first_step"], event["last_step"]) for event in profiles(continued[0])] == [(4, 5)]
    assert steps_in(trace) == {"step 4", "step 5"}


def test_a_trace_that_cannot_be_written_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    links = live(tasks_of(tiny_plan(**WINDOW), tmp_path))
    assert links[0].done()["status"] == "finished"
    (warning,) = (event for event in links[0].events if event["kind"] == "warning")
    assert "rank 0: the trace of steps 3 to 4 could not be written" in warning["message"]


# Memory


def died(rank: int, world: int, link: TestLink, task: RankTask, how: str) -> dict[str, Any]:
    """Live as a rank whose memory runs out in step 2 (the host's in step 1, before anything has been freed that could
    be used again); gives the error's evidence."""
    from orchestrator.engine import train
    from orchestrator.engine.rank import run_rank

    plain = train.train_step

    def exhausted(*args: Any, **options: Any) -> Any:
        if how != "host" and link.beats[-1][1] < 2:
            return plain(*args, **options)
        if how == "host":
            # For real: the process may not grow by more than 4 MiB, which the step's logits alone do.
            grown = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (grown + 4 * 2**20, resource.RLIM_INFINITY))
            try:
                return plain(*args, **options)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        error = torch.OutOfMemoryError if how == "device" else MemoryError
        with patch("torch.optim.adam.adam", side_effect=error("CUDA out of memory. Tried to allocate 2.50 GiB.")):
            return plain(*args, **options)

    with patch.object(train, "train_step", exhausted):
        try:
            run_rank(task, link)
        except Exception as error:
            assert is_out_of_memory(error)
            return error.evidence  # type: ignore[attr-defined, no-any-return]
    raise AssertionError("memory did not run out")


LARGE_LOGITS = {"model__vocab_size": 4096, "training__sequence_length": 64, "training__micro_batch_size": 32}


@pytest.fixture(scope="module", params=["device", "memory error", "host"])
def exhausted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    directory = tmp_path_factory.mktemp("exhausted")
    plan = tiny_plan(**LARGE_LOGITS, training__global_batch_size=32)
    (task,) = tasks_of(plan, directory)
    (evidence,) = _start([(died, (task, request.param))])
    return request.param, directory, evidence


def test_the_evidence_holds_every_category_measured_and_planned(exhausted: tuple[str, Path, Any]) -> None:
    _, _, evidence = exhausted
    assert evidence["kind"] == "out_of_memory"
    assert tuple(evidence["categories"]) == tuple(evidence["planned"]) == CATEGORIES
    parameters = 4 * (2 * 4096 * 32 + 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32)
    assert evidence["planned"]["parameters"] == parameters
    assert evidence["categories"]["parameters"] == parameters
    # Two moments, and a step counter of 4 bytes for each of the 21 parameters.
    asked = 0 if exhausted[0] == "host" else round(2.5 * 2**30)
    assert evidence["categories"]["optimizer"] == 2 * parameters + 4 * 21 + asked


def test_the_category_that_exceeded_the_plan_is_the_one_that_asked_for_too_much(
    exhausted: tuple[str, Path, Any],
) -> None:
    how, _, evidence = exhausted
    if how == "host":
        assert evidence["asked_for"] == "activations"
        assert evidence["asked_bytes"] > 0
    else:
        assert (evidence["asked_for"], evidence["worst_category"]) == ("optimizer", "optimizer")
        assert evidence["asked_bytes"] == round(2.5 * 2**30)


def test_the_account_lies_in_the_runs_folder_for_machines_and_for_people(exhausted: tuple[str, Path, Any]) -> None:
    _, directory, evidence = exhausted
    base = directory / "memory" / "attempt-01-rank-000"
    told = json.loads(base.with_suffix(".json").read_text())
    assert told["categories"] == evidence["categories"]
    assert told["largest_tensors"][0]["bytes"] >= 4096 * 32 * 4
    assert "embedding.weight" in {entry["parameter"] for entry in told["largest_tensors"]}
    text = base.with_suffix(".txt").read_text()
    for name in CATEGORIES:
        assert name in text
    assert evidence["snapshot"] == str(base.with_suffix(".json"))
    assert evidence["snapshot"] in text


def test_an_error_of_another_kind_leaves_no_account(tmp_path: Path) -> None:
    assert not is_out_of_memory(RuntimeError("connection closed by peer"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB", 2 * 2**30),
        ("CUDA out of memory. Tried to allocate 512.00 MiB.", 512 * 2**20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 134217728 bytes.", 134217728),
        ("out of memory", None),
    ],
)
def test_the_size_that_was_asked_for_is_read_from_the_allocators_words(message: str, size: int | None) -> None:
    assert asked_bytes(message) == size


def test_torch_still_takes_the_words_with_which_a_gpu_rank_keeps_its_allocations() -> None:
    """Private functions of torch that only a GPU calls: their parameters are held here."""
    recording = inspect.signature(torch.cuda.memory._record_memory_history_impl)
    recording.bind("all", context=None, max_entries=RING_ENTRIES, device=torch.device("cuda", 0))
    inspect.signature(torch.cuda.memory._snapshot).bind(torch.device("cuda", 0))
