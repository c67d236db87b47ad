"""`dryrun` as it is typed: what it prints and keeps, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from orchestrator.config.compose import load_config
from orchestrator.plan.make import make_plan
from orchestrator.tracking.dryruns import kept_for

pytestmark = pytest.mark.torch


def test_json_holds_the_figures_and_is_kept_for_a_run_of_the_same_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"run.directory={tmp_path}", "model.num_hidden_layers=2"]
    assert main(["dryrun", "--json", *overrides]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["feasible"] and told["differences"] and told["worst"]["rank"] == 0
    assert told["ranks"][0]["memory"]["total"]["simulated_bytes"] == told["worst"]["simulated_bytes"]
    assert kept_for(make_plan(load_config([*overrides, "training.steps=7"]))) == told
    assert kept_for(make_plan(load_config([*overrides, "training.micro_batch_size=2"]))) is None


def test_what_the_engine_cannot_run_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["+experiment=llama7b_zero2", "parallel.data=4", "parallel.context=2"]
    assert main(["dryrun", *overrides]) == 2
    assert "parallel.context" in capsys.readouterr().err


def test_what_the_planner_refuses_is_refused_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "+experiment=llama7b_3d", "parallel.tensor=3"]) == 2
    told = capsys.readouterr().err
    assert "parallel.tensor" in told and "Traceback" not in told
