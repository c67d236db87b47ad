"""`search`: every legal plan for a model on an inventory, best first, and why each other one is none.

Owns the order of plans and the pruning that makes it fast; pruned and whole searches give the same answer (a test).
Each split of `search_space.py` is ranked with its best course. Time decides; plans within a thousandth of each other
are tied and ordered by the article's rule: fewer moving parts, then tensor inside a node before pipeline and context;
those that fill a card to the brim come last.
Bytes and seconds of one candidate are `evaluate.py`; `auto.py` fills `parallel=auto` and `cluster.nodes=auto`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.config.schema import RunConfig
from orchestrator.plan.evaluate import Evaluator
from orchestrator.plan.search_space import (
    RECOMPUTE,
    Candidate,
    Course,
    Split,
    micro_batch_sizes,
    recomputations,
    schedules,
    splits,
)

TIE = 1e-3
"""Share of a step's time within which two plans count as equally fast: far below the time model's own error."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One plan that fits."""

    candidate: Candidate
    step_seconds: float | None
    """None when the hardware's rates are not declared."""
    tight: bool = False
    """Whether it fits by less than the planner's figures are sure to (`evaluate.TIGHT`)."""

    @property
    def preference(self) -> tuple[object, ...]:
        """Order among plans that are equally fast: what fits by a hair comes last."""
        return (self.tight, *preference(self.candidate))


@dataclass(frozen=True, slots=True)
class Rejected:
    """One split that fits in no course."""

    split: Split
    reason: str
    """Of the course that needs least among those tried: where it fails and by how much."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    ranked: tuple[Ranked, ...]
    """Best first, each split with its best course."""
    rejected: tuple[Rejected, ...]
    """In the order of the space."""


def moving_parts(candidate: Candidate) -> int:
    """How many mechanisms a plan uses beside plain data parallelism."""
    split, course = candidate.split, candidate.course
    return sum(
        (
            split.tensor > 1,
            split.pipeline > 1,
            split.context > 1,
            split.zero_stage > 0,
            split.zero_stage > 0 and split.zero_group < split.data * split.context,
            split.offload,
            course.virtual_stages > 1,
            course.schedule not in ("1f1b", "gpipe"),
            course.recompute != "none",
        )
    )


def preference(candidate: Candidate) -> tuple[object, ...]:
    """Order among plans that are equally fast; smaller is better. Total: no two candidates are equal."""
    split, course = candidate.split, candidate.course
    return (
        moving_parts(candidate),
        split.tensor * split.pipeline * split.context,
        -split.tensor,
        split.context,
        split.offload,
        split.zero_stage,
        -split.zero_group,
        RECOMPUTE.index(course.recompute),
        course.virtual_stages,
        course.schedule,
        -course.micro_batch_size,
    )


def ordered(plans: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Best first: by time, ties (within `TIE` of the fastest of the tie) by preference.

    Without times, the preference alone decides, and it takes the largest micro-batch.
    """
    fastest_first = sorted(plans, key=lambda plan: (plan.step_seconds or 0.0, plan.preference))
    result: list[Ranked] = []
    tied: list[Ranked] = []
    for plan in fastest_first:
        if tied and (plan.step_seconds or 0.0) > (tied[0].step_seconds or 0.0) * (1 + TIE):
            result += sorted(tied, key=lambda tie: tie.preference)
            tied = []
        tied.append(plan)
    return tuple(result + sorted(tied, key=lambda tie: tie.preference))


def search(config: RunConfig, *, allowed: Callable[[Candidate], bool] = lambda _: True) -> Found:
    """Every legal plan for `config` whose candidate is `allowed`, with pruning. `cluster.nodes` is a number.

    The model, the batch and the hardware of `config` must have passed `validate/`; its `parallel` section,
    `micro_batch_size` and `activation_checkpointing` are not looked at.
    """
    evaluate = Evaluator(config)
    ranked: list[Ranked] = []
    rejected: list[Rejected] = []
    later: list[Split] = []
    for split in splits(config):
        if split.offload:
            later.append(split)
        else:
            _judge(evaluate, split, allowed, ranked, rejected)
    if not ranked:
        # States in host memory are the last resort: the same split is never slower with its states on the GPU.
        for split in later:
            _judge(evaluate, split, allowed, ranked, rejected)
    return Found(ordered(ranked), tuple(rejected))


def _judge(
    evaluate: Evaluator,
    split: Split,
    allowed: Callable[[Candidate], bool],
    ranked: list[Ranked],
    rejected: list[Rejected],
) -> None:
    best = best_course(evaluate, split, allowed)
    if best is None:
        rejected.append(Rejected(split, reason(evaluate, split)))
    else:
        ranked.append(best)


def _courses(evaluate: Evaluator, split: Split, allowed: Callable[[Candidate], bool]) -> list[Course]:
    """Every course that is allowed with some recomputation, written without."""
    found = []
    for size in micro_batch_sizes(evaluate.config, split):
        for schedule, virtual in schedules(evaluate.config, split, evaluate.micro_batches(split, size)):
            found.append(Course(schedule, virtual, size, "none"))
    return [
        course
        for course in found
        if any(allowed(Candidate(split, course.with_recompute(r))) for r in recomputations(course.schedule))
    ]


def best_course(
    evaluate: Evaluator,
    split: Split,
    allowed: Callable[[Candidate], bool] = lambda _: True,
    *,
    first_fit: bool = False,
) -> Ranked | None:
    """The best course of a split, or with `first_fit` any that fits; None when none does.

    Courses are taken in the order of the least time that they can need; the search ends when that exceeds what has been
    reached.
    """
    queue: list[tuple[float, int, int, Course]] = []
    for index, course in enumerate(_courses(evaluate, split, allowed)):
        _push(queue, evaluate, split, index, 0, course)
    reached: list[Ranked] = []
    fastest: float | None = None
    while queue:
        floor, index, level, course = heapq.heappop(queue)
        if fastest is not None and floor > fastest * (1 + TIE):
            break
        # More recomputation comes with its own, higher least time whatever becomes of this course: where traffic hides
        # behind computation, more of that can be faster.
        _push(queue, evaluate, split, index, level + 1, course)
        candidate = Candidate(split, course)
        if not allowed(candidate):
            continue
        seconds = evaluate.seconds(candidate)
        slower = fastest is not None and seconds is not None and seconds > fastest * (1 + TIE)
        if slower or evaluate.shortage(candidate) is not None:
            continue
        reached.append(Ranked(candidate, seconds, evaluate.tight(candidate)))
        fastest = seconds if fastest is None or seconds is None else min(fastest, seconds)
        if first_fit:
            break
    return ordered(reached)[0] if reached else None


def _push(
    queue: list[tuple[float, int, int, Course]],
    evaluate: Evaluator,
    split: Split,
    index: int,
    level: int,
    course: Course,
) -> None:
    """Queue a course with the least recomputation, from `level` on, with which it may fit; if there is any."""
    levels = len(recomputations(course.schedule))
    higher = evaluate.least_recompute(split, course, level) if level < levels else None
    if higher is not None and higher < levels:
        tried = course.with_recompute(RECOMPUTE[higher])
        heapq.heappush(queue, (evaluate.floor_seconds(Candidate(split, tried)), index, higher, tried))


def reason(evaluate: Evaluator, split: Split) -> str:
    """Why a split fits in no course: where its leanest simple course fails and by how much."""
    schedule, virtual = next(schedules(evaluate.config, split, evaluate.micro_batches(split, 1)))
    shortage = evaluate.leanest_shortage(split, schedule, virtual)
    return shortage[1] if shortage else "none of its courses is allowed here"
