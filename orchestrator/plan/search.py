"""`search`: every legal plan for a model on an inventory, best first, and why each other one is none.

Owns the order of plans and the pruning that makes it fast; pruned and whole searches give the same answer (a test).
Each split of `search_space.py` is ranked with its best course. Time decides; plans within a thousandth of each other
are tied and ordered by the article's rule: fewer moving parts, then tensor inside a node before pipeline and context.
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
    fastest_first = sorted(plans, key=lambda plan: (plan.step_seconds or 0.0, preference(plan.candidate)))
    result: list[Ranked] = []
    tied: list[Ranked] = []
    for plan in fastest_first:
        if tied and (plan.step_seconds or 0.0) > (tied[0].step_seconds or 0.0) * (1 + TIE):
            result += sorted(tied, key=lambda tie: preference(tie.candidate))
            tied = []
        tied.append(plan)
    return tuple(result + sorted(tied, key=lambda tie: preference(tie.candidate)))


def search(config: RunConfig, *, allowed: Callable[[Candidate], bool] = lambda _: True) -> Found:
    """Every legal plan for `config` whose candidate is `allowed`, with pruning. `cluster.nodes` is a number.

    The model, the batch and the hardware of `config` must have passed `validate/`; its `parallel` section,
    `micro_batch_size` and `activation_checkpointing` are not looked at.
    """
    evaluate = Evaluator(config)
    ranked: list[Ranked] = []
    rejected: list[Rejected] = []
    fitting: set[tuple[int, int, int]] = set()
    for split in splits(config):
        place = (split.tensor, split.pipeline, split.context)
        if split.offload and place in fitting:
            continue  # states on the GPU are never slower than states on the host
        best = best_course(evaluate, split, allowed)
        if best is None:
            rejected.append(Rejected(split, reason(evaluate, split)))
        else:
            ranked.append(best)
            fitting.add(place)
    return Found(ordered(ranked), tuple(rejected))


def _courses(evaluate: Evaluator, split: Split, allowed: Callable[[Candidate], bool]) -> list[Course]:
    """Every course without recomputation that may win; `gpipe` only where 1F1B has too few micro-batches."""
    found = []
    for size in micro_batch_sizes(evaluate.config, split):
        kinds = list(schedules(evaluate.config, split, evaluate.micro_batches(split, size)))
        for schedule, virtual in kinds:
            if schedule == "gpipe" and ("1f1b", 1) in kinds:
                continue  # the same time, more kept activations
            found.append(Course(schedule, virtual, size, "none"))
    return [course for course in found if any(allowed(Candidate(split, course.with_recompute(r))) for r in RECOMPUTE)]


def best_course(
    evaluate: Evaluator,
    split: Split,
    allowed: Callable[[Candidate], bool] = lambda _: True,
    *,
    first_fit: bool = False,
) -> Ranked | None:
    """The best course of a split, or with `first_fit` any that fits; None when none does.

    Courses are taken in the order of the least time that they can need; the search ends when that exceeds what has been
    reached. A course that does not fit comes again with the next recomputation and its higher least time.
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
        candidate = Candidate(split, course)
        if allowed(candidate):
            seconds = evaluate.seconds(candidate)
            if fastest is not None and seconds is not None and seconds > fastest * (1 + TIE):
                continue  # neither this course wins nor the same with more recomputation
            if evaluate.shortage(candidate) is None:
                reached.append(Ranked(candidate, seconds))
                fastest = seconds if fastest is None or seconds is None else min(fastest, seconds)
                if first_fit:
                    break
                continue
        _push(queue, evaluate, split, index, level + 1, course)
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
    higher = evaluate.least_recompute(split, course, level) if level < len(RECOMPUTE) else None
    if higher is not None:
        tried = course.with_recompute(RECOMPUTE[higher])
        heapq.heappush(queue, (evaluate.floor_seconds(Candidate(split, tried)), index, higher, tried))


def reason(evaluate: Evaluator, split: Split) -> str:
    """Why a split fits in no course: where its leanest simple course fails and by how much."""
    schedule, virtual = next(schedules(evaluate.config, split, evaluate.micro_batches(split, 1)))
    shortage = evaluate.leanest_shortage(split, schedule, virtual)
    return shortage[1] if shortage else "none of its courses is allowed here"
