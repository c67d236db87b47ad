"""Which samples a step trains on: a pure function of the seed and the step, never of the ranks.

Every epoch visits the samples in another pseudo-random order. The order is never stored: `permute` computes any part of
it, in time and memory of the part asked for, so a resumed run needs nothing but its step. An epoch is as many whole
batches as the samples fill; what is left over (other samples every epoch) is not trained on in it, so that no sample
occurs twice in a step. Only where all samples are fewer than one batch do epochs follow each other inside a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8
"""Feistel rounds, each of which moves one half. 4 are enough in theory (Luby and Rackoff); 8 are still cheap."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the order between two steps: where a run began, or goes on with batches of another size."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs left behind."""
    offset: int = 0
    """Samples of this epoch that were trained on."""


START = Position()


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The endless sequence of sample ids of a run."""

    seed: int
    """`training.seed`."""
    samples: int
    """Samples of the training split."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"an order needs at least one sample, got {self.samples}")

    def ids(self, step: int, global_batch: int, start: Position = START) -> Ids:
        """Sample ids of optimizer step `step` (the first is 1), shape [global_batch].

        Args:
            step: from `start.step` + 1 on.
            global_batch: samples of every step since `start`.
            start: where the batches began to have this size.

        Raises ValueError for a step before the start or a batch below 1.
        """
        if step <= start.step or global_batch < 1:
            raise ValueError(
                f"batches count from 1 and steps from {start.step + 1}, got step {step} and batch {global_batch}"
            )
        first = self.after(step - 1, global_batch, start, whole=global_batch)
        positions = np.arange(first.offset, first.offset + global_batch, dtype=np.int64)
        return permute(positions % self.samples, self.samples, self.seed, first.epoch + positions // self.samples)

    def after(self, step: int, global_batch: int, start: Position = START, *, whole: int = 1) -> Position:
        """The place after step `step`, of batches that have had this size since `start`.

        At the end of an epoch that is the beginning of the next one, if fewer than `whole` samples are left of it.
        """
        batches = step - start.step
        if self.samples < global_batch:
            done = start.epoch * self.samples + start.offset + batches * global_batch
            return Position(step, done // self.samples, done % self.samples)
        in_first, in_each = (self.samples - start.offset) // global_batch, self.samples // global_batch
        if batches <= in_first:
            place = Position(step, start.epoch, start.offset + batches * global_batch)
        else:
            epochs, left = divmod(batches - in_first, in_each)
            place = Position(step, start.epoch + 1 + epochs, left * global_batch)
            if not left:
                place = Position(step, start.epoch + epochs, in_each * global_batch)
        return place if self.samples - place.offset >= whole else Position(step, place.epoch + 1, 0)

    def epoch(self, step: int, global_batch: int) -> float:
        """Epochs completed after step `step` (whole and part)."""
        return step * global_batch / self._epoch_length(global_batch)

    def _epoch_length(self, global_batch: int) -> int:
        """Samples that one epoch trains on: whole batches, or all samples where they fill none."""
        return self.samples // global_batch * global_batch or self.samples


def permute(positions: Ids, samples: int, seed: int, epochs: Ids | int = 0) -> Ids:
    """The samples at `positions` (each in [0, samples)) of the order of `epochs`; same shape.

    A bijection of [0, samples) for every seed and epoch: an alternating Feistel network over Z_a x Z_b, where a x b is
    the smallest such rectangle with a = ceil(sqrt(samples)), and cycle-walking for the few points beyond `samples`
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and (positions.min() < 0 or positions.max() >= samples):
        raise ValueError(f"positions must lie in [0, {samples})")
    rows = math.isqrt(samples - 1) + 1 if samples > 1 else 1
    columns = -(-samples // rows)
    keys = _round_keys(seed, np.broadcast_to(np.asarray(epochs, dtype=np.int64), positions.shape))
    values = _feistel(positions.astype(np.uint64), keys, rows, columns)
    while (outside := values >= samples).any():
        # A point outside is sent on along its cycle, which returns into the range: its own start lies inside.
        values[outside] = _feistel(values[outside], keys[:, outside], rows, columns)
    return values.astype(np.int64)


def shard(ids: Ids, data_rank: int, data_ranks: int, micro_batch_size: int) -> Ids:
    """The part of a step's `ids` that one data rank trains on, shape [micro_batches, micro_batch_size].

    The ranks' parts are disjoint and together are `ids`, in order. Raises ValueError when the batch is not a multiple
    of data_ranks x micro_batch_size (the plan refuses such a configuration before anything starts).
    """
    if not 0 <= data_rank < data_ranks:
        raise ValueError(f"data rank {data_rank} is not one of {data_ranks}")
    if len(ids) % (data_ranks * micro_batch_size):
        raise ValueError(
            f"a batch of {len(ids)} does not split over {data_ranks} data ranks in micro-batches of {micro_batch_size}"
        )
    own = len(ids) // data_ranks
    return ids[data_rank * own : (data_rank + 1) * own].reshape(-1, micro_batch_size)


def _feistel(values: _Words, keys: _Words, rows: int, columns: int) -> _Words:
    """One pass: each round adds a hash of one half to the other half, which is invertible whatever the hash."""
    high, low = np.divmod(values, np.uint64(columns))
    for round_, key in enumerate(keys):
        if round_ % 2:
            low = (low + _mix(high ^ key) % np.uint64(columns)) % np.uint64(columns)
        else:
            high = (high + _mix(low ^ key) % np.uint64(rows)) % np.uint64(rows)
    return high * np.uint64(columns) + low


def _round_keys(seed: int, epochs: Ids) -> _Words:
    """Keys of all rounds for every point, shape [rounds, points]."""
    base = _mix(np.full(1, seed & 0xFFFF_FFFF_FFFF_FFFF, dtype=np.uint64))
    by_epoch = _mix(base ^ epochs.astype(np.uint64))
    rounds = _mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64))
    return _mix(by_epoch[None, :] ^ rounds[:, None])


def _mix(words: _Words) -> _Words:
    """SplitMix64's output function (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E37_79B9_7F4A_7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        return words ^ (words >> np.uint64(31))
