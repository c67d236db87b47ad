"""`verify` as a command and as processes: what it prints, its exit codes, and what happens to a rank that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.cli.main import main
from orchestrator.engine import verify
from orchestrator.engine.verify_case import cases_of, global_batches, samples_of
from orchestrator.engine.verify_processes import RanksFailedError, run_on_ranks
from orchestrator.engine.verify_reference import NOT_LEARNED
from orchestrator.plan.reduce import reductions
from tests.engine import faults
from tests.engine.cases import tiny_plan

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_shares_no_code_with_the_engine() -> None:
    script = """
import sys
import orchestrator.engine.verify_reference
print([name for name in sys.modules if name.startswith("orchestrator.") and name != "orchestrator.engine"])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['orchestrator.engine.verify_reference']"


def test_some_data_rank_has_no_valid_token_and_the_rest_is_ragged() -> None:
    (reduction,) = reductions(tiny_plan(parallel__data=2, training__micro_batch_size=1))
    case = cases_of(reduction)[0]
    batches = [labels for _, labels in global_batches(case, samples_of(case))]
    valid = [[int((half != NOT_LEARNED).sum()) for half in labels.chunk(2)] for labels in batches]
    assert min(valid[0]) > 0
    assert [step.index(0) for step in valid[1:]] == [0, 1, 0]
    assert len({int(count) for count in (batches[0] != NOT_LEARNED).sum(1)}) > 1


def test_a_pipeline_of_one_data_rank_meets_a_micro_batch_without_a_valid_token() -> None:
    (reduction,) = reductions(tiny_plan(training__micro_batch_size=1))
    case = cases_of(reduction)[0]
    (first, second, *_) = [
        (labels != NOT_LEARNED).sum(1).tolist() for _, labels in global_batches(case, samples_of(case))
    ]
    assert (0 in first, 0 in second) == (False, True)


PLAN = ["cluster.gpus_per_node=2", "parallel.tensor=2", "parallel.data=1", "model.num_key_value_heads=2"]


def test_the_command_prints_what_was_reduced_and_the_largest_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *PLAN]) == 0
    said = capsys.readouterr().out
    assert "Reference: plain torch on one process" in said
    assert "Reduction 1 of 1: 2 CPU processes (tensor 2)" in said
    assert "model.hidden_size 192 -> " in said
    for what in ("loss", "gradient", "gradient norm", "weight"):
        assert f"    {what} " in said
    assert ".weight in step" in said
    assert said.endswith("The plan and one process do the same training.\n")


def test_a_mistake_ends_with_exit_code_3_and_names_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = partial(verify.verify, mistake=faults.replicated_weights_counted_by_every_tensor_rank)
    monkeypatch.setattr(verify, "verify", planted)
    assert main(["verify", *PLAN, "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["agrees"] is False
    (reduction,) = said["reductions"]
    assert (reduction["processes"], reduction["axes"]["tensor"]) == (2, 2)
    exact = reduction["comparisons"][0]
    assert exact["differences"]["gradient_norm"]["value"] > 1e-3
    assert not exact["differences"]["gradient_norm"]["agrees"]
    assert exact["differences"]["loss"]["where"].startswith("step ")
    assert {change["key"] for change in reduction["changes"]} >= {"model.hidden_size", "training.sequence_length"}


def fails_on_rank_one(*, beat: Any) -> None:
    beat("about to fail" if dist.get_rank() else "waiting for rank 1")
    if dist.get_rank() == 1:
        raise ValueError("a deliberate mistake")
    dist.all_reduce(torch.zeros(1))


def dies_on_rank_one(*, beat: Any) -> None:
    beat("about to die")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def hangs(*, beat: Any) -> None:
    beat(f"waiting in {dist.get_rank()}")
    if dist.get_rank() == 1:
        signal.pause()
    dist.all_reduce(torch.zeros(1))


def test_an_exception_on_one_rank_ends_all_with_its_message_on_top() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_on_ranks(3, fails_on_rank_one)
    first, *trace = caught.value.problems[0].message.splitlines()
    assert first.startswith("Rank 1 of 3: ValueError: a deliberate mistake.")
    assert any("fails_on_rank_one" in line for line in trace)
    assert caught.value.exit_code == 3


def test_a_rank_that_dies_is_named_with_how_and_where() -> None:
    with pytest.raises(RanksFailedError, match=r"Rank 1 of 2: its process died \(SIGKILL\) while about to die"):
        run_on_ranks(2, dies_on_rank_one)


def test_ranks_that_hang_are_ended_after_a_while_and_each_is_named() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_on_ranks(2, hangs, patience_seconds=15)
    assert "rank 0: waiting in 0, rank 1: waiting in 1" in str(caught.value)


def test_a_failing_rank_is_told_without_a_traceback_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "verify", partial(verify.verify, mistake=faults.nothing_but_an_error))
    assert main(["verify", *PLAN]) == 3
    said = capsys.readouterr().err
    assert said.startswith("`verify` failed.\n1. Rank ")
    assert "a deliberate error" in said
    assert "defect of the program" not in said


@pytest.mark.slow
@pytest.mark.parametrize("words", [["+experiment=" + name] for name in (
    "quickstart", "llama7b_offload", "llama7b_ddp", "llama7b_zero1", "llama7b_zero2", "llama7b_zero3", "llama7b_3d",
    "llama13b_zero2", "llama70b_3d", "llama3_8b", "llama3_405b", "gpt3_175b",
)], ids=" ".join)  # fmt: skip
def test_every_experiment_is_the_same_training_as_one_process(words: list[str]) -> None:
    assert main(["verify", *words]) == 0
