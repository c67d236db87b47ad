"""`search`: every legal plan for a model on an inventory, best first, and why each other one is none.

Owns the order of plans and the pruning that makes it fast; pruned and whole searches give the same answer (a test).
Each split of `search_space.py` is ranked with its best course. Time decides; plans within a thousandth of each other
are tied and ordered by the article's rule: fewer moving parts, then tensor inside a node before pipeline and context;
those that fill a card to the brim come last.
Bytes and seconds of one candidate are `evaluate.py`, the least that they can be `bounds.py`; `auto.py` fills
`parallel=auto` and `cluster.nodes=auto`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from orchestrator.config.schema import RunConfig
from orchestrator.plan.bounds import Bounds
from orchestrator.plan.evaluate import Evaluator
from orchestrator.plan.search_space import RECOMPUTE, Candidate, Split, schedules, splits

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
    bounds = Bounds(Evaluator(config))
    ranked: list[Ranked] = []
    rejected: list[Rejected] = []
    later: list[Split] = []
    for split in splits(config):
        if split.offload:
            later.append(split)
        else:
            _judge(bounds, split, allowed, ranked, rejected)
    if not ranked:
        # States in host memory are the last resort: the same split is never slower with its states on the GPU.
        for split in later:
            _judge(bounds, split, allowed, ranked, rejected)
    return Found(ordered(ranked), tuple(rejected))


def _judge(
    bounds: Bounds,
    split: Split,
    allowed: Callable[[Candidate], bool],
    ranked: list[Ranked],
    rejected: list[Rejected],
) -> None:
    best = best_course(bounds, split, allowed)
    if best is None:
        rejected.append(Rejected(split, reason(bounds.evaluate, split)))
    else:
        ranked.append(best)


def best_course(bounds: Bounds, split: Split, allowed: Callable[[Candidate], bool] = lambda _: True) -> Ranked | None:
    """The best course of a split; None when none fits.

    Courses are tried in the order of the least time that they can need; the search ends when that exceeds what has been
    reached. Of each, what is cheapest to know comes first: rank 0's memory at least, the time, the memory of all ranks.
    """
    evaluate, slowest = bounds.evaluate, inf
    reached: list[Ranked] = []
    for least_seconds, bounded in bounds.fastest_first(split):
        if least_seconds > slowest:
            break
        candidate = Candidate(split, bounded.course)
        if not bounds.may_fit(split, bounded) or not allowed(candidate):
            continue
        passes = evaluate.passes(candidate)
        if passes is not None and passes.total > slowest:
            continue
        seconds = evaluate.seconds(candidate)
        if seconds is not None and seconds > slowest:
            continue
        peak = evaluate.peak_where_it_fits(candidate)
        if peak is None:
            continue
        reached.append(Ranked(candidate, seconds, evaluate.tight(peak)))
        if seconds is not None:
            slowest = min(slowest, seconds * (1 + TIE))
    return ordered(reached)[0] if reached else None


def fits_somehow(bounds: Bounds, split: Split) -> bool:
    """Whether any course of a split fits; the leanest are tried first."""
    return any(
        bounds.may_fit(split, bounded)
        and bounds.evaluate.peak_where_it_fits(Candidate(split, bounded.course)) is not None
        for bounded in sorted(bounds.courses(split), key=lambda bounded: bounded.activations)
    )


def reason(evaluate: Evaluator, split: Split) -> str:
    """Why a split fits in no course: where its leanest simple course fails and by how much."""
    schedule, virtual = next(schedules(evaluate.config, split, evaluate.micro_batches(split, 1)))
    shortage = evaluate.leanest_shortage(split, schedule, virtual)
    return shortage[1] if shortage else "none of its courses is allowed here"
