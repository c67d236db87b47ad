from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from orchestrator import load_config, make_plan
from tests.benchmarks.ddp import Run, table
from tests.benchmarks.workload import Workload


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_our_side_runs_the_same_workload_as_the_rival(precision: str) -> None:
    load = replace(Workload(), precision=precision)
    config = load_config(load.overrides("/tmp/benchmark"))
    plan = make_plan(config)
    assert plan.problems == ()
    assert plan.parallel is not None
    assert (plan.parallel.data, plan.parallel.world_size, plan.parallel.micro_batches) == (2, 2, 1)
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(config.model, field) == getattr(load, field)
    assert config.training.steps == load.steps
    assert config.training.gradient_clip == load.gradient_clip
    assert config.optimizer.betas == (0.9, 0.95)
    assert (config.optimizer.schedule.name, config.optimizer.schedule.minimum_ratio) == ("cosine", 0.1)
    assert not config.model.tie_word_embeddings
    assert config.data.source == "synthetic"


def test_the_workload_reaches_a_script_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(Workload(), hidden_size=128, lr=1e-3, precision="bf16_mixed")
    monkeypatch.setattr("sys.argv", ["script", *load.arguments(), "--own=x"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--own")
    assert Workload.from_arguments(parser)[0] == load


def test_ratios_are_taken_within_a_round() -> None:
    def run(contestant: str, speed: float, first: float) -> Run:
        return Run(contestant, "fp32", first, speed, None, 8.0, 8.0, 0.0, {"imports": first})

    # The machine is half as fast in the second round; ours is 1.1 times as fast in each.
    runs = [run("rival", 100, 4), run("ours", 110, 6), run("rival", 50, 8), run("ours", 55, 12)]
    text = table(runs, ["rival", "ours"])
    assert "x 1.100 in tokens/s, x 1.50 in seconds" in text
    assert "medians of 2 rounds" in text
