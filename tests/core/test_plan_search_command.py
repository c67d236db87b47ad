"""`search` as it is typed: exit codes, what goes where, what can be typed back."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from orchestrator.cli.main import main
from orchestrator.config.compose import load_config
from orchestrator.plan.make import make_plan

Say = Callable[..., tuple[int, str, str]]

SMALL = ("+experiment=llama7b_zero2", "training.global_batch_size=16")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_it_lists_plans_and_ends_with_0(say: Say) -> None:
    code, out, err = say("search", *SMALL)
    assert (code, err) == (0, "")
    assert "plans fit on 1 node x 8 = 8 GPUs" in out
    assert "The best, to be typed" in out


def test_the_overrides_of_every_listed_plan_give_that_plan(say: Say) -> None:
    code, out, _ = say("search", *SMALL, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["plans"]
    for row in found["plans"][::7]:
        plan = make_plan(load_config([*SMALL, *row["overrides"]]))
        assert plan.feasible
        assert plan.memory is not None
        assert plan.parallel is not None
        assert plan.memory.peak_bytes == row["peak_bytes"]
        assert plan.time.step_seconds == row["step_seconds"]
        assert plan.parallel.world_size == row["world_size"]


def test_the_number_of_nodes_is_found(say: Say) -> None:
    code, out, _ = say("search", *SMALL, "cluster.nodes=auto")
    assert code == 0
    assert "on 1 node x 8 = 8 GPUs" in out


def test_when_nothing_fits_it_says_how_many_nodes_would_do_and_ends_with_2(say: Say) -> None:
    code, out, err = say(
        *("search", "+experiment=llama70b_3d", "cluster.nodes=1", "cluster.host_memory_gib=256"),
        "training.global_batch_size=64",
    )
    assert code == 2
    assert "0 plans fit" in out
    assert "pipeline rank 0 needs" in out
    assert "No plan for this model fits on 1 node x 8 = 8 GPUs" in err
    assert "cluster.nodes=" in err


def test_a_configuration_that_no_split_mends_is_refused_before_searching(say: Say) -> None:
    code, out, err = say("search", *SMALL, "training.sequence_length=100000", "model.num_attention_heads=48")
    assert (code, out) == (2, "")
    assert "training.sequence_length" in err
    assert "model.num_attention_heads" in err
