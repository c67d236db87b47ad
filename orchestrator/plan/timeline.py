"""What a list of actions costs: how long it takes, how much of it is idle, and how many micro-batches it keeps.

Owns the reading of `schedules.py`'s lists. Times follow from dependencies alone: a stage's forward waits for that of
the stage before, a backward for that of the stage after, and each rank works through its list in order. Long steps are
continued from shorter ones, because after the first rounds every schedule repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.schedules import SPLIT_BACKWARDS, ActionList, Shape, action_lists, rank_actions
from orchestrator.plan.stages import stages_of_rank

_SETTLING_ROUNDS = 4
"""Rounds of `pipeline` micro-batches after which a schedule repeats itself; a test compares with whole simulations."""

_ALIKE_ROUNDS = 2
"""The same for V-shaped schedules when all stages are alike: from then on each micro-batch adds exactly its own time;
interleaved ones need one round."""
_KEPT_ROUNDS = 2
"""Rounds within which every schedule reaches the most that it ever keeps."""


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """Time of one micro-batch in each virtual stage; the whole backward takes inputs + weights."""

    forward: tuple[float, ...]
    backward_inputs: tuple[float, ...]
    backward_weights: tuple[float, ...]
    hop: float = 0.0
    """From one rank's stage to the next stage on another rank, where it is not hidden."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of the pipeline."""

    seconds: float
    """From the first forward to the end of the last action of any rank."""
    busy_seconds: tuple[float, ...]
    """Computation of each pipeline rank; the rest of `seconds` is its bubble."""

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the ranks' time, averaged over the ranks (0 to 1)."""
        return 1.0 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.seconds) if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Micro-batches whose activations one stage keeps at an instant."""

    whole: int
    """Forward done, backward not begun."""
    weights_only: int
    """Input gradients done, weight gradients not: what those need is still kept."""


def shape_of(parallel: ParallelFacts) -> Shape:
    """The schedule of a plan with its sizes."""
    return Shape(parallel.schedule, parallel.pipeline, parallel.virtual_stages, parallel.micro_batches)


def simulate(lists: Sequence[ActionList], seconds: ActionSeconds) -> Timeline:
    """Run the lists. O(actions).

    Raises:
        ValueError: the lists wait for each other for ever (they are then no schedule).
    """
    stages = len(seconds.forward)
    owner = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    forward: list[dict[int, float]] = [{} for _ in range(stages)]
    backward: list[dict[int, float]] = [{} for _ in range(stages)]
    clock = [0.0] * len(lists)
    busy = [0.0] * len(lists)
    position = [0] * len(lists)
    backward_seconds = [i + w for i, w in zip(seconds.backward_inputs, seconds.backward_weights, strict=True)]
    hop_down = [seconds.hop if stage and owner[stage] != owner[stage - 1] else 0.0 for stage in range(stages)]
    left = sum(len(actions) for actions in lists)
    while left:
        before = left
        for rank, actions in enumerate(lists):
            at, now, work = position[rank], clock[rank], busy[rank]
            while at < len(actions):
                stage, kind, number, _ = actions[at]
                if kind == "F":
                    ready = forward[stage - 1].get(number) if stage else 0.0
                    wait, cost = hop_down[stage], seconds.forward[stage]
                elif kind == "W":
                    ready, wait, cost = 0.0, 0.0, seconds.backward_weights[stage]
                else:
                    last = stage == stages - 1
                    ready = forward[stage].get(number) if last else backward[stage + 1].get(number)
                    wait = 0.0 if last else hop_down[stage + 1]
                    cost = backward_seconds[stage] if kind == "B" else seconds.backward_inputs[stage]
                if ready is None:
                    break
                now = max(now, ready + wait) + cost
                work += cost
                if kind == "F":
                    forward[stage][number] = now
                elif kind != "W":
                    backward[stage][number] = now
                at += 1
            left -= at - position[rank]
            position[rank], clock[rank], busy[rank] = at, now, work
        if left == before:
            raise ValueError("the action lists wait for each other for ever")
    return Timeline(max(clock), tuple(busy))


def _alike(seconds: ActionSeconds) -> bool:
    """Whether all stages take equally long and nothing is lost between them."""
    columns = (seconds.forward, seconds.backward_inputs, seconds.backward_weights)
    return seconds.hop == 0 and all(len(set(column)) == 1 for column in columns)


def _alike_timeline(shape: Shape, seconds: ActionSeconds) -> Timeline:
    """Exact for stages that are alike: each rank computes m turns and, in plain schedules, waits (p - 1) / v turns."""
    schedule, pipeline, virtual_stages, micro_batches = shape
    turn = virtual_stages * (seconds.forward[0] + seconds.backward_inputs[0] + seconds.backward_weights[0])
    busy = (micro_batches * turn,) * pipeline
    if schedule in ("gpipe", "1f1b") or (schedule == "interleaved_1f1b" and micro_batches % pipeline == 0):
        return Timeline((micro_batches + (pipeline - 1) / virtual_stages) * turn, busy)
    near = shape.shorter(1 if schedule.startswith("interleaved") else _ALIKE_ROUNDS)
    return Timeline(_simulated(near, seconds).seconds + (micro_batches - near.micro_batches) * turn, busy)


@lru_cache(maxsize=16384)
def _simulated(shape: Shape, seconds: ActionSeconds) -> Timeline:
    return simulate(action_lists(shape), seconds)


@lru_cache(maxsize=16384)
def pipeline_timeline(shape: Shape, seconds: ActionSeconds) -> Timeline:
    """The timeline of a schedule; its cost does not grow with the number of micro-batches.

    Beyond a few rounds it continues with what the last round added: exact with like stages and for GPipe, 1F1B and the
    interleaved schedules; V-shaped schedules over unlike stages settle late and may be off by about 1 %.
    """
    if _alike(seconds):
        return _alike_timeline(shape, seconds)
    near = shape.shorter(2 * _SETTLING_ROUNDS)
    reached = _simulated(near, seconds)
    if near == shape:
        return reached
    less = shape.shorter(2 * _SETTLING_ROUNDS - 1)
    before = _simulated(less, seconds)
    times = (shape.micro_batches - near.micro_batches) / (near.micro_batches - less.micro_batches)
    return Timeline(
        reached.seconds + times * (reached.seconds - before.seconds),
        tuple(now + times * (now - then) for now, then in zip(reached.busy_seconds, before.busy_seconds, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class Crest:
    """What a rank keeps when it keeps most, of the time in which the same of its stages have gradients."""

    begun: tuple[bool, ...]
    """Whether a backward pass of the stage has begun, stages ascending: its gradients exist then."""
    kept: tuple[Kept, ...]
    weight: float
    """What that comes to in the unit of the stages' weights."""
    done: tuple[bool, ...] = ()
    """Whether the last backward pass of the stage is over, where one is; only of schedules with whole ones."""
    passed_on: tuple[int, ...] = ()
    """Micro-batches of each stage whose backward pass is over the last time that as much is kept; of schedules with
    several stages."""


@lru_cache(maxsize=65536)
def peak_kept(
    shape: Shape, rank: int, stage_weights: tuple[float, ...], weights_only_share: float = 1.0
) -> tuple[Kept, ...]:
    """What each stage of a rank keeps at the instant at which most is kept, stages ascending.

    `stage_weights` is what one micro-batch keeps in each of the rank's stages (bytes, or layers); a micro-batch that
    only waits for its weight gradients counts `weights_only_share` of that, which may be more than all of it.
    """
    return max(crests(shape, rank, stage_weights, weights_only_share), key=lambda crest: crest.weight).kept


def crests(
    shape: Shape, rank: int, stage_weights: tuple[float, ...], weights_only_share: float = 1.0
) -> tuple[Crest, ...]:
    """What a rank keeps at most before its first backward pass and, stage by stage, after it, in order of time.

    A micro-batch counts until its backward pass is done. Arguments as for `peak_kept`.
    """
    if shape.schedule in ("gpipe", "1f1b") or shape.pipeline == 1:
        return _crests_of_one_stage(shape, rank)
    # More plans share what is kept of a walk when what does not count is always 1.
    share = weights_only_share if shape.schedule in SPLIT_BACKWARDS else 1.0
    few = shape.shorter(_KEPT_ROUNDS)
    return _crests(few, rank, stage_weights, share, shape.micro_batches - few.micro_batches)


@lru_cache(maxsize=65536)
def _crests(
    shape: Shape, rank: int, stage_weights: tuple[float, ...], weights_only_share: float, left_out: int
) -> tuple[Crest, ...]:
    virtual_stages = shape.virtual_stages
    place = {stage: at for at, stage in enumerate(stages_of_rank(rank, shape.pipeline, virtual_stages, shape.schedule))}
    whole, rest, begun = [0] * virtual_stages, [0] * virtual_stages, [False] * virtual_stages
    left = [shape.micro_batches] * virtual_stages
    done: tuple[bool, ...] = ()
    found: list[tuple[tuple[bool, ...], tuple[int, ...], tuple[int, ...], float, tuple[bool, ...]]] = []
    passed_on: list[tuple[int, ...]] = []
    weight, most, actions = 0.0, -1.0, rank_actions(shape, rank)
    for number, (stage, kind, _, _) in enumerate(actions):
        at = place[stage]
        if kind == "F":
            whole[at] += 1
            weight += stage_weights[at]
        elif kind == "W":
            rest[at] -= 1
            weight -= stage_weights[at] * weights_only_share
        else:
            whole[at] -= 1
            rest[at] += kind == "I"
            weight -= stage_weights[at] * (1 - weights_only_share if kind == "I" else 1.0)
        if kind != "F" and not begun[at]:
            begun[at], most = True, -1.0
        if kind in "BI":
            left[at] -= 1
            if not left[at] and any(left) and shape.schedule not in SPLIT_BACKWARDS:
                done, most = tuple(not count for count in left), -1.0
        if weight > most * (1 + 1e-12):
            highest = (tuple(begun), tuple(whole), tuple(rest), weight, done)
            found[len(found) - (most >= 0) :] = [highest]
            most = weight
        if weight >= most * (1 - 1e-12):
            more = left_out if 2 * number > len(actions) else 0
            passed_on[len(found) - 1 :] = [tuple(shape.micro_batches - count + more for count in left)]
    return tuple(
        Crest(begun_then, tuple(map(Kept, whole_then, rest_then)), weight_then, done_then, passed_then)
        for (begun_then, whole_then, rest_then, weight_then, done_then), passed_then in zip(
            found, passed_on, strict=True
        )
    )


@lru_cache(maxsize=65536)
def highest_crests(
    shape: Shape, rank: int, stage_weights: tuple[float, ...], weights_only_share: float = 1.0
) -> tuple[Crest, ...]:
    """Those of `crests` that can be where a rank holds most: without one after which as much is kept and more stages
    have gradients, and without one before which that is so because stages are done since."""
    found = crests(shape, rank, stage_weights, weights_only_share)
    chosen: list[Crest] = []
    for crest in reversed([each for each in found if not each.done]):
        if not chosen or crest.weight > chosen[-1].weight * (1 + 1e-9):
            chosen.append(crest)
    most = max((crest.weight for crest in chosen if all(crest.begun)), default=0.0)
    return (*reversed(chosen), *(crest for crest in found if crest.done and crest.weight > most))


def _crests_of_one_stage(shape: Shape, rank: int) -> tuple[Crest, ...]:
    """All forwards come first in GPipe, so all are kept; without a pipeline one micro-batch is done before the next
    begins."""
    micro_batches = shape.micro_batches
    if shape.pipeline == 1:
        most, after = 1, min(1, micro_batches - 1)
    elif shape.schedule == "gpipe":
        most, after = micro_batches, micro_batches - 1
    else:
        most = min(micro_batches, shape.pipeline - rank)
        after = most if micro_batches > most else most - 1
    return tuple(
        Crest((begun,) * shape.virtual_stages, (Kept(count, 0),) * shape.virtual_stages, float(count))
        for begun, count in ((False, most), (True, after))
        if count
    )
