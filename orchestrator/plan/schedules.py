"""Pipeline schedules as lists of actions: what each pipeline rank computes, in order.

Owns the six schedules of the contract, each the same list that torch's schedule of that name runs (a test compares them
action by action). The lists hold computation only; sends and receives follow from them. What a list costs in time and
in kept activations is read from it in `timeline.py`; which counts of micro-batches it takes is in `validate/`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from orchestrator.plan.stages import stages_of_rank

Kind = Literal["F", "B", "I", "W"]
"""`F` forward; `B` whole backward; `I` backward for the inputs only; `W` backward for the weights, after its `I`."""


SPLIT_BACKWARDS = frozenset({"interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"})
"""Schedules that split a backward pass into inputs and weights."""


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int
    overlapped: bool = False
    """Whether it may run together with the action after it (DualPipeV joins a forward and a backward)."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


ActionList = tuple[Action, ...]


class Shape(NamedTuple):
    """A schedule and the sizes that its lists follow from; all have passed `validate/pipeline_rules.py`."""

    schedule: str
    pipeline: int
    virtual_stages: int
    micro_batches: int

    def shorter(self, rounds: int) -> Shape:
        """The same schedule with at most `rounds` rounds of micro-batches: with as many it takes the same course."""
        if self.schedule.startswith("interleaved"):
            whole = max(1, self.micro_batches // self.pipeline)
            count = self.micro_batches // whole * min(whole, rounds)
        else:
            count = min(self.micro_batches, self.pipeline * rounds)
        return self._replace(micro_batches=count)


def _gpipe(rank: int, pipeline: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    yield from (Action(rank, "F", number) for number in range(micro_batches))
    yield from (Action(rank, "B", number) for number in range(micro_batches))


def _one_f_one_b(rank: int, pipeline: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """As many forwards as there are stages after this one, plus one; then backward and forward in turn
    (Narayanan et al. 2019, PipeDream-Flush)."""
    ahead = min(micro_batches, pipeline - rank)
    yield from (Action(rank, "F", number) for number in range(ahead))
    for number in range(micro_batches):
        yield Action(rank, "B", number)
        if ahead + number < micro_batches:
            yield Action(rank, "F", ahead + number)


class _Rounds(NamedTuple):
    """Interleaving: micro-batches go through a rank's stages in rounds of about `pipeline` micro-batches."""

    rank: int
    pipeline: int
    virtual: int
    per_round: int
    """Micro-batches of a round."""

    def unit(self, index: int, *, backward: bool) -> tuple[int, int]:
        """(stage, micro-batch) of the rank's `index`-th forward or backward."""
        turn, place = divmod(index, self.per_round)
        number, chunk = divmod(turn, self.virtual)
        if backward:
            chunk = self.virtual - 1 - chunk
        return chunk * self.pipeline + self.rank, number * self.per_round + place


def _rounds(rank: int, pipeline: int, virtual: int, micro_batches: int) -> _Rounds:
    return _Rounds(rank, pipeline, virtual, micro_batches // max(1, micro_batches // pipeline))


def _interleaved_1f1b(rank: int, pipeline: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """1F1B over several stages a rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    rounds, total = _rounds(rank, pipeline, virtual, micro_batches), virtual * micro_batches
    ahead = min((virtual - 1) * rounds.per_round + 2 * (pipeline - 1 - rank), total)
    for index in range(ahead):
        stage, number = rounds.unit(index, backward=False)
        yield Action(stage, "F", number)
    for index in range(total):
        if ahead + index < total:
            stage, number = rounds.unit(ahead + index, backward=False)
            yield Action(stage, "F", number)
        stage, number = rounds.unit(index, backward=True)
        yield Action(stage, "B", number)


def _interleaved_zero_bubble(rank: int, pipeline: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """ZB1P: as interleaved 1F1B with half the lead; each weight gradient waits `rank` input gradients, which fills the
    bubble at the end (Qi et al. 2023, arXiv:2401.10241)."""
    rounds, total = _rounds(rank, pipeline, virtual, micro_batches), virtual * micro_batches
    ahead = min((virtual - 1) * rounds.per_round + pipeline - 1 - rank, total)
    for index in range(ahead):
        stage, number = rounds.unit(index, backward=False)
        yield Action(stage, "F", number)
    for index in range(total):
        if ahead + index < total:
            stage, number = rounds.unit(ahead + index, backward=False)
            yield Action(stage, "F", number)
        stage, number = rounds.unit(index, backward=True)
        yield Action(stage, "I", number)
        if index >= rank:
            stage, number = rounds.unit(index - rank, backward=True)
            yield Action(stage, "W", number)
    for index in range(max(0, total - rank), total):
        stage, number = rounds.unit(index, backward=True)
        yield Action(stage, "W", number)


def _zbv_steps(rank: int, pipeline: int, micro_batches: int) -> Iterator[tuple[int, Kind]]:
    """(chunk, kind) of ZB-V for at least 2p - 1 micro-batches: chunk 0 goes down the V, chunk 1 comes up."""
    forwards = [0, 0]

    def forward(chunk: int) -> tuple[int, Kind]:
        forwards[chunk] += 1
        return chunk, "F"

    both: tuple[Kind, ...] = ("I", "W")
    yield from (forward(0) for _ in range(2 * (pipeline - rank) - 1))
    for _ in range(rank):
        yield forward(1)
        yield forward(0)
    for _ in range(pipeline - rank):
        yield forward(1)
        yield from ((1, kind) for kind in both)
    while forwards[1] < forwards[0] or forwards[0] < micro_batches:
        if forwards[0] < micro_batches:
            yield forward(0)
        yield from ((0, kind) for kind in both)
        yield forward(1)
        yield from ((1, kind) for kind in both)
    for _ in range(rank):
        yield 0, "I"
        yield 1, "I"
    for _ in range(pipeline - rank):
        yield 0, "I"
        yield 0, "W"
    yield from ((1, "W") for _ in range(rank))
    yield from ((0, "W") for _ in range(rank))


def _zbv(rank: int, pipeline: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """ZB-V: two stages a rank in the shape of a V, no bubble when F, I and W take equally long (Qi et al. 2023,
    section 6). Made for 2p - 1 micro-batches and cut down when there are fewer."""
    stages = stages_of_rank(rank, pipeline, 2, "zbv_zero_bubble")
    done: dict[tuple[int, Kind], int] = {}
    for chunk, kind in _zbv_steps(rank, pipeline, max(2 * pipeline - 1, micro_batches)):
        number = done.get((chunk, kind), 0)
        done[chunk, kind] = number + 1
        if number < micro_batches:
            yield Action(stages[chunk], kind, number)


class _DualPipeV:
    """Writes DualPipeV's list for one rank: counts micro-batches by stage and remembers weights still to be done."""

    def __init__(self, rank: int, pipeline: int) -> None:
        self.stages = stages_of_rank(rank, pipeline, 2, "dualpipev")
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.pending: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int, overlapped: bool = False) -> Action:
        number = self.forwards[chunk]
        self.forwards[chunk] += 1
        return Action(self.stages[chunk], "F", number, overlapped)

    def backward(self, chunk: int, split: bool = False) -> Action:
        number = self.backwards[chunk]
        self.backwards[chunk] += 1
        if split:
            self.pending.append((self.stages[chunk], number))
        return Action(self.stages[chunk], "I" if split else "B", number)

    def weight(self) -> Iterator[Action]:
        if self.pending:
            stage, number = self.pending.popleft()
            yield Action(stage, "W", number)

    def together(self, forward: int, backward: int) -> Iterator[Action]:
        yield self.forward(forward, overlapped=True)
        yield self.backward(backward)


def _dualpipev_steady(write: _DualPipeV, rank: int, pipeline: int, micro_batches: int) -> Iterator[Action]:
    """The part in which forwards of one chunk overlap with backwards of the other."""
    for turn in range(micro_batches - 2 * pipeline + rank + 1):
        if turn == 0 and rank == pipeline - 1:
            yield write.forward(0)
            yield write.backward(1)
        else:
            yield from write.together(forward=0, backward=1)
        yield from write.together(forward=1, backward=0)
    for _ in range(pipeline - rank - 1):
        yield write.backward(1)
        yield from write.together(forward=1, backward=0)


def _dualpipev(rank: int, pipeline: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """DualPipeV: ZB-V's shape with overlapped forward and backward (DeepSeek-AI 2024, arXiv:2412.19437, and its
    published code)."""
    write = _DualPipeV(rank, pipeline)
    after = pipeline - rank - 1
    yield from (write.forward(0) for _ in range(2 * after))
    for _ in range(rank + 1):
        yield write.forward(0)
        yield write.forward(1)
    for _ in range(after):
        yield write.backward(1, split=True)
        yield from write.weight()
        yield write.forward(1)
    yield from _dualpipev_steady(write, rank, pipeline, micro_batches)
    # The second half of the last backwards is split, so that weight gradients fill the drain; even ranks begin with
    # chunk 0 of the middle turn, odd ones with its chunk 1.
    middle = (rank + 1) // 2
    for turn in range(rank + 1):
        yield write.backward(1, split=turn > middle or (turn == middle and rank % 2 == 1))
        yield write.backward(0, split=turn >= middle)
    for _ in range(after):
        yield from write.weight()
        yield write.backward(0, split=True)
    for _ in range(rank + 1):
        yield from write.weight()


_WRITERS: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved_1f1b": _interleaved_1f1b,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv_zero_bubble": _zbv,
    "dualpipev": _dualpipev,
}


@lru_cache(maxsize=4096)
def rank_actions(shape: Shape, rank: int) -> ActionList:
    """What one pipeline rank computes, in order.

    The list has each (stage of the rank, micro-batch) once as `F`, and once as `B` or as `I` and `W`.
    """
    return tuple(_WRITERS[shape.schedule](rank, shape.pipeline, shape.virtual_stages, shape.micro_batches))


def action_lists(shape: Shape) -> tuple[ActionList, ...]:
    """What every pipeline rank computes; index = pipeline rank."""
    return tuple(rank_actions(shape, rank) for rank in range(shape.pipeline))
