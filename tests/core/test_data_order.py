from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.order import START, SampleOrder, permute, shard

seeds = st.integers(min_value=0, max_value=2**63)


@given(samples=st.integers(1, 5000), seed=seeds, epoch=st.integers(0, 2**40))
def test_an_epoch_visits_every_sample_exactly_once(samples: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(samples), samples, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(samples))


@given(samples=st.integers(1, 2**50), seed=seeds, data=st.data())
def test_any_part_of_a_huge_order_is_computed_alone_and_agrees_with_the_rest(
    samples: int, seed: int, data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=20)))
    together = permute(positions, samples, seed)
    alone = np.array([permute(np.array([position]), samples, seed)[0] for position in positions])
    assert np.array_equal(together, alone)
    assert together.min() >= 0
    assert together.max() < samples


def test_orders_of_different_seeds_and_epochs_are_unrelated() -> None:
    positions = np.arange(10_000)
    orders = [permute(positions, 10_000, seed, epoch) for seed in (0, 1, 2**32) for epoch in (0, 1, 2)]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            # Two random orders of n samples agree in one place on average (a Poisson law): 10 are out of the question.
            assert (first == second).sum() < 10


@pytest.mark.parametrize("samples", [997, 1000, 1024, 4097])
def test_the_order_looks_random(samples: int) -> None:
    """Positions and samples are uncorrelated, and each decile of positions draws from all deciles of samples alike."""
    orders = np.stack([permute(np.arange(samples), samples, seed) for seed in range(200)])
    correlations = [np.corrcoef(np.arange(samples), order)[0, 1] for order in orders]
    assert abs(float(np.mean(correlations))) < 4 / np.sqrt(samples * 200)
    tenths = orders * 10 // samples
    for positions in np.array_split(np.arange(samples), 10):
        drawn = np.bincount(tenths[:, positions].ravel(), minlength=10)
        expected = drawn.sum() / 10
        assert (np.abs(drawn - expected) < 5 * np.sqrt(expected)).all()


@given(
    seed=seeds,
    samples=st.integers(1, 300),
    step=st.integers(1, 10**6),
    data_ranks=st.integers(1, 8),
    micro_batches=st.integers(1, 4),
    micro_batch=st.integers(1, 4),
)
def test_the_ranks_parts_are_disjoint_and_together_the_step(
    seed: int, samples: int, step: int, data_ranks: int, micro_batches: int, micro_batch: int
) -> None:
    batch = data_ranks * micro_batches * micro_batch
    ids = SampleOrder(seed, samples).ids(step, batch)
    parts = [shard(ids, rank, data_ranks, micro_batch) for rank in range(data_ranks)]
    assert all(part.shape == (micro_batches, micro_batch) for part in parts)
    assert np.array_equal(np.concatenate([part.ravel() for part in parts]), ids)
    if samples >= batch:
        assert len(set(ids.tolist())) == batch, "a sample occurs twice in a step"


@pytest.mark.parametrize(("samples", "batch"), [(12, 4), (13, 4), (5, 5), (1000, 7)])
def test_the_batches_of_an_epoch_are_disjoint_and_only_less_than_a_batch_is_left_out(samples: int, batch: int) -> None:
    order = SampleOrder(3, samples)
    steps = samples // batch
    for epoch in range(3):
        seen = np.concatenate([order.ids(epoch * steps + step, batch) for step in range(1, steps + 1)])
        assert len(set(seen.tolist())) == len(seen) == steps * batch > samples - batch
    assert order.epoch(steps, batch) == 1.0


def test_fewer_samples_than_a_batch_wrap_into_further_epochs_evenly() -> None:
    order = SampleOrder(0, 3)
    ids = np.concatenate([order.ids(step, 8) for step in range(1, 4)])
    assert np.bincount(ids).tolist() == [8, 8, 8]
    for epoch in range(8):
        assert sorted(ids[epoch * 3 : epoch * 3 + 3]) == [0, 1, 2]


def test_a_resumed_run_takes_the_samples_that_an_unbroken_one_would_have() -> None:
    unbroken = [SampleOrder(7, 100).ids(step, 6).tolist() for step in range(1, 60)]
    resumed = SampleOrder(7, 100)
    assert [resumed.ids(step, 6).tolist() for step in range(23, 60)] == unbroken[22:]


@given(seed=seeds, samples=st.integers(1, 300), batch=st.integers(1, 40), step=st.integers(1, 400), data=st.data())
def test_going_on_from_any_place_with_the_same_batch_changes_nothing(
    seed: int, samples: int, batch: int, step: int, data: st.DataObject
) -> None:
    order = SampleOrder(seed, samples)
    start = order.after(data.draw(st.integers(0, step - 1)), batch)
    assert np.array_equal(order.ids(step, batch, start), order.ids(step, batch))
    assert order.after(step, batch, start) == order.after(step, batch)


@given(seed=seeds, batches=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=5))
def test_a_changed_batch_goes_on_where_the_order_stands_and_repeats_nothing_within_an_epoch(
    seed: int, batches: list[tuple[int, int]]
) -> None:
    order, place, seen = SampleOrder(seed, 1000), START, []
    for batch, steps in batches:
        for step in range(place.step + 1, place.step + steps + 1):
            seen += order.ids(step, batch, place).tolist()
        place = order.after(place.step + steps, batch, place)
    assert len(set(seen)) == len(seen) == place.offset
    assert place.epoch == 0


def test_a_batch_that_what_is_left_of_an_epoch_does_not_fill_begins_the_next_one() -> None:
    order = SampleOrder(0, 100)
    place = order.after(3, 30)
    assert (place.epoch, place.offset) == (0, 90)
    assert order.ids(4, 10, place).tolist() == permute(np.arange(90, 100), 100, 0, 0).tolist()
    assert order.ids(4, 20, place).tolist() == permute(np.arange(20), 100, 0, 1).tolist()


def test_the_order_is_fixed_for_ever() -> None:
    """A change of this sequence would make saved runs continue with other samples."""
    assert SampleOrder(0, 1000).ids(1, 8).tolist() == [482, 460, 236, 847, 837, 89, 734, 628]


@pytest.mark.parametrize(
    "call",
    [
        lambda: SampleOrder(0, 0),
        lambda: SampleOrder(0, 5).ids(0, 4),
        lambda: SampleOrder(0, 5).ids(1, 0),
        lambda: SampleOrder(0, 5).ids(3, 1, SampleOrder(0, 5).after(3, 1)),
        lambda: permute(np.array([5]), 5, 0),
        lambda: permute(np.array([-1]), 5, 0),
        lambda: shard(np.arange(8), 0, 3, 1),
        lambda: shard(np.arange(8), 2, 2, 1),
        lambda: shard(np.arange(8), 0, 2, 3),
    ],
)
def test_what_makes_no_sense_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"\w"):
        call()
