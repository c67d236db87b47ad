"""What a rank holds when each action of a schedule begins that splits its backward passes, in counts: no bytes.

Owns the reading of such a list as torch carries it out (`stage_backward_input`, `stage_backward_weight`,
`_PipelineScheduleRuntime` and FSDP2 of torch 2.13), where that is not what the list's letters say:

- The backward pass for the inputs gives nothing back; gradients of products' and norms' results join what is kept.
- Gradients of weights come as the product makes them and wait so until the next backward pass of the same stage goes
  through its units: only there are they added to sums in the type of the reduction. Those of the last stage are added
  as the backward pass for weights comes to the head, whose own gradient alone waits.
- A first stage has no input's gradient to compute: its whole backward pass comes where the list has that for weights.
- A stage's sums are reduced, and its copies given back, as soon as its last micro-batch is done.

What that comes to in bytes: `split_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple

from orchestrator.plan.schedules import Shape, rank_actions
from orchestrator.plan.stages import stages_of_rank

_ROUNDS = 4
"""Rounds of `pipeline` micro-batches within which every state comes that ever does."""

Doing = Literal["F", "B", "I", "W", "reduce"]


class Moment(NamedTuple):
    """What a rank holds while it is about to do something. Forward passes other than the last stage's are left out:
    they hold no more than what follows them."""

    at: int
    """Place of the stage at work among the rank's."""
    doing: Doing
    held: tuple[int, ...]
    """Six numbers for each stage, stages ascending, one kind after the other: micro-batches whose backward has not
    begun, and those that only wait for their weights' gradients, the one at work included; 1 where sums of the stage's
    gradients exist; 1 where gradients wait to be added to them; 1 until the stage is done and its gradients are
    reduced; micro-batches whose input's gradient has been computed, and so whose output is kept for the send alone.
    """
    summed: bool
    """Whether sums exist of the gradients of the stage at work."""
    waiting: bool
    """Whether gradients of it wait to be added to them."""


def moments(shape: Shape, rank: int, *, gradients_wait: bool) -> tuple[Moment, ...]:
    """The moments of a step, without those in which less is held than in another of the same kind.

    `gradients_wait`: the product's gradients of weights are narrower than their sums; otherwise they are the sums.
    """
    few = shape.shorter(_ROUNDS)
    return _moments(few, rank, gradients_wait, shape.micro_batches - few.micro_batches)


@lru_cache(maxsize=16384)
def _moments(shape: Shape, rank: int, gradients_wait: bool, left_out: int) -> tuple[Moment, ...]:
    largest = dict[tuple[int, Doing], list[tuple[int, ...]]]()
    for at, doing, held in _walk(shape, rank, gradients_wait, left_out):
        alike = largest.setdefault((at, doing), [])
        if not any(all(map(ge, other, held)) for other in alike):
            alike[:] = [other for other in alike if not all(map(ge, held, other))]
            alike.append(held)
    count = shape.virtual_stages
    return tuple(
        Moment(at, doing, held, bool(held[2 * count + at]), bool(held[3 * count + at]))
        for (at, doing), alike in largest.items()
        for held in alike
    )


def _walk(shape: Shape, rank: int, gradients_wait: bool, left_out: int) -> Iterator[tuple[int, Doing, tuple[int, ...]]]:
    """(`at`, `doing`, `held`) of every moment of the shape's step.

    `left_out`: micro-batches of the real step that the shape leaves out in its middle.
    """
    own = stages_of_rank(rank, shape.pipeline, shape.virtual_stages, shape.schedule)
    places, end = {stage: at for at, stage in enumerate(own)}, shape.pipeline * shape.virtual_stages - 1
    whole, weights_only, passed_on, done = ([0] * len(own) for _ in range(4))
    summed, waiting, unreduced = [0] * len(own), [0] * len(own), [1] * len(own)
    actions, before = rank_actions(shape, rank), 0

    def held() -> tuple[int, ...]:
        real = (number + before for number in passed_on)
        return (*whole, *weights_only, *summed, *waiting, *unreduced, *real)

    for number, (stage, kind, _, _) in enumerate(actions):
        if 2 * number > len(actions):
            before = left_out
        at = places[stage]
        if stage == 0 and kind == "I":
            continue
        doing: Doing = "B" if stage == 0 and kind == "W" else kind
        if doing == "F":
            whole[at] += 1
            if stage == end:
                yield at, doing, held()
            continue
        yield at, doing, held()
        if doing == "W":
            weights_only[at] -= 1
            waiting[at] = int(gradients_wait)
            summed[at] |= not gradients_wait or stage == end
        else:
            whole[at] -= 1
            weights_only[at] += doing == "I"
            passed_on[at] += 1
            summed[at] |= waiting[at] or doing == "B"
            waiting[at] = 0
        done[at] += doing != "I"
        if done[at] == shape.micro_batches:
            yield at, "reduce", held()
            summed[at] = waiting[at] = unreduced[at] = 0
