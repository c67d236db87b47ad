"""Bytes of a rank in the moments of a schedule that splits its backward passes (`split_moments.py`).

Owns what each action needs beside what is held when it begins. The other schedules are `memory.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul

from orchestrator.plan.activations import BlockActivations
from orchestrator.plan.split_moments import Moment
from orchestrator.plan.states import StateMemory

Instant = tuple[float, float, float, float, float]
"""Bytes of gradients, gathered copies, activations, logits and buffers at one moment of a step."""


@dataclass(frozen=True, slots=True)
class SplitRank:
    """A rank under such a schedule; tuples go over its stages, ascending."""

    states: StateMemory
    block: BlockActivations
    layers: tuple[int, ...]
    shares: tuple[float, ...]
    """Part of the rank's weights that is each stage's."""
    kept: tuple[float, ...]
    """What a micro-batch keeps of each stage from its forward to its backward pass."""
    output: tuple[float, ...]
    """A stage's output, where it is sent and not handed over on the rank: part of `kept`, and after that kept until
    the step's end, when torch waits for sends."""
    input: tuple[float, ...]
    """The gradient of a stage's input, where it is sent."""
    lasting: float
    """Activations that are there always: what the rank hands over to itself."""
    buffers: float
    """Buffers that are there always."""
    last: int | None
    """Place of the model's last stage; None: it is on another rank."""
    head_weight: float
    """The gradient of the head's weight, which its forward pass leaves for the backward pass of each micro-batch."""
    logits: float
    """What is as wide as the vocabulary when the loss is largest."""
    beside_logits: float
    """Activations of the head then, beside those that it keeps."""
    narrow: float
    """Bytes of a gradient that waits relative to its sum; 0: none waits."""
    left: float
    """Part of a stage's gradients that is kept once they are reduced."""
    on_host: bool
    """Whether gradients are kept in host memory."""

    def waits(self, at: int) -> float:
        """Gradients of a stage that wait to be added to its sums."""
        if at == self.last:
            return self.head_weight if self.narrow else 0.0
        return self.states.gradients * self.narrow * self.shares[at]


def fullest(rank: SplitRank, moments: tuple[Moment, ...]) -> Instant:
    """Bytes by category in the moment in which most is held."""
    rows = _bytes_of_each(rank)
    reduced = 0.0 if rank.on_host else rank.states.gradients * rank.left * sum(rank.shares)
    always = reduced, 0.0, rank.lasting, 0.0, rank.buffers
    total = [sum(column) for column in zip(*rows, strict=True)]
    needs: dict[tuple[int, str, bool, bool], Instant] = {}

    def need(moment: Moment) -> Instant:
        kind = moment.at, moment.doing, moment.summed, moment.waiting
        if kind not in needs:
            needs[kind] = max(_needs(rank, moment), key=sum)
        return needs[kind]

    found = max(moments, key=lambda moment: sum(map(mul, total, moment.held)) + sum(need(moment)))
    of_rank = (sum(map(mul, row, found.held)) for row in rows)
    return tuple(map(sum, zip(always, of_rank, need(found), strict=True)))  # type: ignore[return-value]


def _bytes_of_each(rank: SplitRank) -> tuple[list[float], ...]:
    """For each category, bytes of one of each number of `Moment.held`, beside what there is always: gradients that are
    reduced among it, which a stage that is not done has not."""
    states, places = rank.states, range(len(rank.layers))
    nothing = [0.0 for _ in places]
    sums = [0.0 if rank.on_host else states.gradients * share for share in rank.shares]
    kept_sums = [rank.left * each for each in sums]
    copies = [states.gathered * share for share in rank.shares]
    weight = [rank.head_weight if at == rank.last else 0.0 for at in places]
    only = [rank.kept[at] + rank.layers[at] * rank.block.deferred - rank.output[at] for at in places]
    sent = [rank.output[at] + rank.input[at] for at in places]
    waits = [rank.waits(at) for at in places]
    return (
        [*nothing, *nothing, *sums, *nothing, *(-each for each in kept_sums), *nothing],
        [*nothing, *nothing, *nothing, *nothing, *copies, *nothing],
        [*rank.kept, *only, *nothing, *nothing, *nothing, *sent],
        [*weight, *weight, *nothing, *nothing, *nothing, *nothing],
        [*nothing, *nothing, *nothing, *waits, *nothing, *nothing],
    )


def _needs(rank: SplitRank, moment: Moment) -> Iterator[Instant]:
    """What an action has, at its fullest instants, beside what is held when it begins; less than nothing of what it
    has given back by then."""
    if moment.doing == "F":
        yield 0.0, 0.0, rank.beside_logits, rank.logits - rank.head_weight, 0.0
    elif moment.doing == "I":
        yield from _inputs(rank, moment)
    elif moment.doing == "W":
        yield from _weights(rank, moment)
    elif moment.doing == "B":
        yield from _whole(rank, moment)
    else:
        yield 0.0, 0.0, 0.0, 0.0, _reduced(rank, moment)


def _inputs(rank: SplitRank, moment: Moment) -> Iterator[Instant]:
    """A stage's backward pass for its inputs: its first block, and its last one, when what waited has been added up."""
    at, block = moment.at, rank.block
    layers, waits = rank.layers[at], rank.waits(at) * moment.waiting
    if at == rank.last:
        # The head's gradient, which alone has waited, is added up at once.
        yield 0.0, 0.0, layers * block.deferred + 2.0 * block.handed_on, 0.0, -waits
        return
    yield 0.0, 0.0, min(layers, 1) * block.deferred + block.handed_on, 0.0, 0.0
    sums = _new_sums(rank, moment) if waits else 0.0
    # The last block's gradients are added up one by one, and gone then.
    unit = min(waits, block.weight_added if sums else rank.narrow * _sums_of_block(rank.states))
    yield sums, 0.0, layers * block.deferred + block.handed_on, 0.0, unit - waits


def _weights(rank: SplitRank, moment: Moment) -> Iterator[Instant]:
    """A stage's backward pass for its weights: its start, and its end, when products' inputs and the gradients of their
    results have gone and all else is there until the last weight is done."""
    yield 0.0, 0.0, 0.0, 0.0, 0.0
    at, block = moment.at, rank.block
    gone, sums = rank.layers[at] * (block.deferred + block.products_inputs), _new_sums(rank, moment)
    if not rank.narrow:
        yield sums, 0.0, -gone, 0.0, 0.0
    elif at == rank.last:
        blocks = rank.states.gradients * rank.shares[at] - rank.head_weight / rank.narrow
        yield 0.0, 0.0, -gone, 0.0, rank.narrow * blocks
        yield min(sums, blocks), 0.0, -gone, 0.0, 0.0
    else:
        yield 0.0, 0.0, -gone, 0.0, 0.0 if moment.waiting else rank.waits(at)


def _whole(rank: SplitRank, moment: Moment) -> Iterator[Instant]:
    """A stage's whole backward pass: its first block, its last one, and its end, when the embedding comes."""
    at, block, states = moment.at, rank.block, rank.states
    layers, sums, waits = rank.layers[at], _new_sums(rank, moment), rank.waits(at) * moment.waiting
    working = block.working_added, min(block.weight_added, float(states.weight_gradients))
    after = block.handed_on - block.kept, float(states.transient_gradients)
    before = (layers - 1) * block.kept
    for beside, weights in (working, after) if layers else ():
        yield 0.0, 0.0, beside, 0.0, weights
        yield max(0.0, sums - _sums_of_block(states)), 0.0, beside - before, 0.0, weights - waits
    yield sums, 0.0, block.handed_on - layers * block.kept, 0.0, -waits


def _reduced(rank: SplitRank, moment: Moment) -> float:
    """Buffers of a stage's first unit that is reduced, less what is given back before: its copy, and its gradients that
    waited."""
    if rank.states.summed_alone:
        return float(rank.states.summed_alone)
    unit, at = _sums_of_block(rank.states), moment.at
    waits = 0.0 if at == rank.last or not moment.waiting else rank.narrow * unit
    return unit - rank.states.block_weights - waits


def _new_sums(rank: SplitRank, moment: Moment) -> float:
    """Sums of the gradients of the stage at work, where they do not exist yet."""
    if rank.on_host or moment.summed:
        return 0.0
    return rank.states.gradients * rank.shares[moment.at]


def _sums_of_block(states: StateMemory) -> float:
    """Sums of a block's gradients."""
    return states.block_weights * states.gradients / max(1, states.gathered)
