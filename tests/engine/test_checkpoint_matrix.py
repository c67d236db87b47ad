"""Any committed checkpoint loads under any other plan, bit for bit; a resumed run is the unbroken one.

A few launches of ranks save under every plan and load under every other. The whole matrix is `-m slow`; by default four
plans of at most two ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.checkpoint_matrix import FAST, PLANS, SAVED_AT, STEPS, Seen, load_under, save_under, whole, world_of
from tests.engine.gloo import live, on_ranks

pytestmark = pytest.mark.torch

TOLERANCE = 1e-5
"""Of a loss, between plans: sums in another order."""


def by_world(names: list[str]) -> dict[int, list[str]]:
    """Plans by their number of ranks: each number is one launch."""
    return {world: [n for n in names if world_of(n) == world] for world in sorted({world_of(n) for n in names})}


def check_matrix(names: list[str], directory: Path) -> int:
    """Save under every plan, load under every other; returns the number of pairs that were compared."""
    unbroken: dict[str, list[Seen]] = {}
    for world, plans in by_world(names).items():
        ranks = on_ranks(world, save_under, plans, directory)
        for name in plans:
            before, after = zip(*(rank[name] for rank in ranks), strict=True)
            unbroken[name] = list(before)
            assert all(len(seen.losses) == STEPS - SAVED_AT for seen in before)
            check_equal(list(before), list(after), f"{name}, resumed")
            assert [seen.losses for seen in after] == [seen.losses for seen in before], f"{name}: 10 = 5 + 5"
            final = whole([seen.final for seen in before])
            for tensor_name, tensor in whole([seen.final for seen in after]).items():
                assert torch.equal(tensor, final[tensor_name]), f"{name}: {tensor_name} after 5 + 5 steps"
    pairs = 0
    for world, plans in by_world(names).items():
        ranks_found = on_ranks(world, load_under, plans, names, directory)
        for name in plans:
            for saved in ranks_found[0][name]:
                loaded = [rank[name][saved] for rank in ranks_found]
                check_equal(unbroken[saved], loaded, f"{saved} loaded under {name}")
                expected = unbroken[saved][0].losses[0]
                assert loaded[0].losses[0] == pytest.approx(expected, abs=TOLERANCE), f"{saved} under {name}"
                pairs += 1
    return pairs


def check_equal(before: list[Seen], after: list[Seen], what: str) -> None:
    """Weights, moments and counters together are the same bits."""
    expected, found = whole([seen.state for seen in before]), whole([seen.state for seen in after])
    assert found.keys() == expected.keys(), what
    assert any(name.endswith("exp_avg_sq") for name in found)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), f"{what}: {name} differs"


def test_checkpoints_of_some_plans_load_under_the_others(tmp_path: Path) -> None:
    assert check_matrix(list(FAST), tmp_path) == 12


@pytest.mark.slow
def test_checkpoints_of_every_plan_load_under_every_other(tmp_path: Path) -> None:
    assert check_matrix(list(PLANS), tmp_path) == 72


def samples_of(directory: Path) -> list[list[int]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    ids = [[sample for rank in line["samples"] for sample in rank] for line in lines]
    assert all(len(set(step)) == len(step) == 8 for step in ids), "each sample of a step is on one data rank"
    return ids


def test_the_samples_of_twenty_steps_depend_neither_on_the_ranks_nor_on_their_change_at_step_ten(
    tmp_path: Path,
) -> None:
    steps = {"training__steps": 20, "training__global_batch_size": 8}
    for ranks in (1, 2, 4):
        live(tasks_of(tiny_plan(**steps, parallel__data=ranks), tmp_path / f"{ranks}"))
    changed = tmp_path / "changed"
    live(tasks_of(tiny_plan(**steps, parallel__data=4), changed), stop_at_step={3: 11})
    live(tasks_of(tiny_plan(**steps, parallel__data=2, parallel__zero_stage=2), changed, attempt=2))
    expected = samples_of(tmp_path / "1")
    assert samples_of(tmp_path / "2") == expected
    assert samples_of(tmp_path / "4") == expected
    assert samples_of(changed) == expected
