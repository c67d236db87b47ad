"""The parity check can fail: each planted mistake is seen, and the same plan without it passes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.engine import faults
from tests.engine.faults import Plant
from tests.engine.gloo import on_ranks
from tests.engine.parity import Case, RankTrace, expected, run_cases, together
from tests.engine.parity_cases import CLIPPED, TIED, UNEVEN, case, pipeline, tensor, zero

pytestmark = pytest.mark.torch


def planted(rank: int, world: int, work: list[tuple[Case, Plant | None]]) -> list[RankTrace]:
    """Every case with its mistake made; the mistakes change numbers, never which collectives meet."""
    found = []
    for one, plant in work:
        with plant() if plant is not None else nullcontext():
            found += run_cases(rank, world, [one])
    return found


def difference(one: Case, ranks: list[RankTrace]) -> str | None:
    """What the parity check says; None: nothing."""
    try:
        initial, found = together(ranks)
    except AssertionError as error:
        return str(error)
    reference = expected(one, initial)
    if found.losses != pytest.approx(reference.losses, abs=1e-5):
        return "losses differ"
    if any(rank.norms != pytest.approx(reference.norms, rel=1e-5) for rank in ranks):
        return "norms differ"
    for name, weight in reference.weights.items():
        if not torch.allclose(found.weights[name], weight, atol=1e-5, rtol=1e-5):
            return f"{name} differs"
    return None


DATA = case("data", "ragged", CLIPPED, parallel__data=2, training__micro_batch_size=1)
ZERO_3 = case("ZeRO-3", "ragged", CLIPPED, **zero(2, 3))
ZERO_2 = case("ZeRO-2", "ragged", CLIPPED, **zero(2, 2))
TENSOR = case("tensor", "ragged", CLIPPED, **tensor(2))
UNEVEN_CUT = case("tensor, uneven vocabulary", "ragged", CLIPPED, **tensor(2), **UNEVEN)
STAGES = case("pipeline", "ragged", CLIPPED, **pipeline(2, "1f1b"), **TIED)

PLANTED: list[tuple[Plant, Case]] = [
    (faults.gradient_divided_by_accumulation, DATA),
    (faults.norm_of_this_rank_alone, ZERO_3),
    (faults.norm_of_this_rank_alone, STAGES),
    (faults.tied_gradients_not_summed, STAGES),
    (faults.replicated_weights_counted_by_every_tensor_rank, TENSOR),
    (faults.padded_rows_enter_the_loss, UNEVEN_CUT),
    (faults.each_tensor_rank_normalises_its_own_part, TENSOR),
    (faults.the_last_chunk_of_the_loss_is_left_out, DATA),
    (faults.stale_weights_after_the_step, ZERO_2),
    (faults.mask_ignored_in_the_token_count, DATA),
    (faults.mean_of_means_over_ranks, DATA),
    (faults.data_ranks_read_the_same_samples, DATA),
    (faults.rotary_positions_from_the_local_part, TENSOR),
    (faults.gradients_reduced_after_the_last_micro_batch_only_lose_the_others, ZERO_3),
]


SOUND: list[tuple[Plant | None, Case]] = [(None, one) for one in (DATA, ZERO_2, ZERO_3, TENSOR, UNEVEN_CUT, STAGES)]
EVERYTHING = [*PLANTED, *SOUND]


@pytest.fixture(scope="module")
def said() -> list[str | None]:
    """What the check says of each of `EVERYTHING`."""
    by_rank = on_ranks(2, planted, [(one, plant) for plant, one in EVERYTHING])
    return [difference(one, [traces[index] for traces in by_rank]) for index, (_, one) in enumerate(EVERYTHING)]


NAMES = [f"{plant.__name__} under {one.name}" for plant, one in PLANTED]


@pytest.mark.parametrize("index", range(len(PLANTED)), ids=NAMES)
def test_a_planted_mistake_is_seen(index: int, said: list[str | None]) -> None:
    assert said[index] is not None


@pytest.mark.parametrize("index", range(len(PLANTED), len(EVERYTHING)), ids=[one.name for _, one in SOUND])
def test_the_same_plan_without_a_mistake_passes(index: int, said: list[str | None]) -> None:
    assert said[index] is None
