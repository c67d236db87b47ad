"""The benchmark against peers: who meets whom, how turns are taken, what the table says. No torch, no times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator import load_config, make_plan
from tests.benchmarks.peers_contestants import BASE, GROUPS, Contestant, contestants_of
from tests.benchmarks.peers_table import comparison_lines, cpu_ratios, speed_lines, speed_ratios
from tests.benchmarks.turns import Driver, Turn
from tests.benchmarks.workload import Workload

RANK = """
import os
from tests.benchmarks.gate import Gate
gate = Gate(int(os.environ["RANK"]))
loss = None
while True:
    gate.wait(loss)
    loss = (loss or 0) + 1
"""


def turn(seconds: float, cpu_seconds: float = 1.0) -> Turn:
    return Turn(seconds, cpu_seconds, load_before=0.0, loss=None)


@pytest.mark.parametrize("group", GROUPS)
def test_our_contestants_run_plans_that_the_engine_takes(group: str) -> None:
    for contestant in contestants_of(group, Workload(), None, ["default"]):
        if contestant.module != "engine_ranks":
            continue
        plan = make_plan(load_config(contestant.load.overrides("/tmp/benchmark")))
        assert plan.problems == (), contestant.name
        assert plan.parallel is not None
        assert plan.parallel.world_size == contestant.ranks
        assert plan.parallel.micro_batches == contestant.load.micro_batches
        assert plan.parallel.zero_stage == contestant.load.zero_stage


@pytest.mark.parametrize("group", GROUPS)
def test_torchrun_ddp_is_in_every_group_and_each_opponent_takes_part(group: str) -> None:
    contestants = contestants_of(group, Workload(), "/env/bin/python", ["default", "kept"])
    names = [contestant.name for contestant in contestants]
    assert names[0] == BASE
    assert len(set(names)) == len(names)
    for contestant in contestants:
        assert set(contestant.targets) <= set(names)
        assert bool(contestant.targets) == (contestant.module == "engine_ranks")


def test_rivals_run_with_and_without_our_setting_of_malloc() -> None:
    contestants = contestants_of("zero3", Workload(), "/env/bin/python", ["default", "kept"])
    kept = {contestant.name: "MALLOC_TRIM_THRESHOLD_" in contestant.environment for contestant in contestants}
    assert kept["FSDP2 loop, ZeRO-3, malloc kept"]
    assert not kept["FSDP2 loop, ZeRO-3"]
    assert kept["DeepSpeed ZeRO-3, malloc kept"]


def test_deepspeed_takes_part_only_where_it_is_installed() -> None:
    names = [contestant.name for contestant in contestants_of("zero2", Workload(), None, ["default"])]
    assert names == [BASE, "FSDP2 loop, ZeRO-2", "ours ZeRO-2"]


def test_ratios_are_taken_within_a_round_and_above_one_is_better() -> None:
    # The machine is half as fast in the second round; ours takes 0.8 of the rival's time in each.
    assert speed_ratios([turn(0.8), turn(1.6)], [turn(1.0), turn(2.0)]) == pytest.approx([1.25, 1.25])
    assert cpu_ratios([turn(1, 2.0)], [turn(1, 1.0)]) == pytest.approx([0.5])


def test_the_table_says_what_was_not_reached() -> None:
    load = Workload()
    rival = Contestant(BASE, "rival_ddp", load)
    ours = Contestant("ours", "engine_ranks", load, targets={BASE: 0.95})
    turns = {BASE: [turn(1.0), turn(2.0)], "ours": [turn(2.0), turn(4.0)]}
    (_, row) = comparison_lines([rival, ours], turns)
    assert row.split()[:3] == ["ours", "/", "torchrun"]
    assert "0.500 (0.500 to 0.500)" in row
    assert row.endswith("0.95 NOT reached")
    assert len(speed_lines([rival, ours], turns, 4)) == 3


def test_ranks_take_exactly_the_steps_that_a_turn_allows(tmp_path: Path) -> None:
    with Driver([sys.executable, "-c", RANK], 2, {}, tmp_path) as driver:
        assert driver.turn(3).loss == 3
        assert driver.turn(2).loss == 5


def test_a_rank_that_ends_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no such model"),
        Driver([sys.executable, "-c", "raise SystemExit('no such model')"], 2, {}, tmp_path),
    ):
        pass
