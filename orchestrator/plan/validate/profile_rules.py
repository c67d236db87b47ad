"""Rules of the profiler window: it lies within the run, and its traces stay of a size that somebody can open."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.errors import Problem
from orchestrator.plan.batch import steps_of
from orchestrator.plan.facts import Facts

MOST_STEPS = 20
"""Of a window: every operation and kernel of every step is an entry, thousands a layer, all held in host memory until
the window ends."""
MOST_RANKS = 16
"""That write a trace."""

_KEY = "training.profile_steps"


def window_lies_in_the_run(facts: Facts) -> Iterator[Problem]:
    """First step, last step, in that order, few, and before the run ends."""
    window, steps = facts.config.training.profile_steps, steps_of(facts.config.training)
    if window is None:
        return
    first, last = window
    if first > last:
        yield Problem(_KEY, f"The window begins at step {first} and ends at step {last}.", f"Use [{last},{first}].")
    elif last - first + 1 > MOST_STEPS:
        yield Problem(
            _KEY,
            f"[{first},{last}] are {last - first + 1:,} steps; a trace holds at most {MOST_STEPS}, every operation of "
            "each is in it.",
            f"Use [{first},{first + MOST_STEPS - 1}], or fewer.",
        )
    if steps is not None and max(first, last) > steps:
        latest = max(1, steps - abs(last - first))
        yield Problem(
            _KEY,
            f"The window [{first},{last}] goes beyond the last step, {steps:,}: it would never be complete.",
            f"Use [{latest},{steps}], or training.steps={max(first, last)}.",
        )


def profiled_ranks_exist(facts: Facts) -> Iterator[Problem]:
    """Ranks that write a trace are ranks of the plan, each once, and not too many."""
    training, world = facts.config.training, facts.world_size
    if training.profile_steps is None:
        return
    ranks = training.profile_ranks
    count = world if ranks == "all" else len(set(ranks))
    if count is not None and count > MOST_RANKS:
        yield Problem(
            "training.profile_ranks",
            f"{count:,} ranks would each write a trace into the run's folder; at most {MOST_RANKS} may.",
            f"Name those that differ, for example [0] or one of each pipeline rank: at most {MOST_RANKS} numbers.",
        )
    if ranks == "all":
        return
    if not ranks:
        yield Problem("training.profile_ranks", "No rank is named, so no trace would be written.", "Use [0] or all.")
    beyond = sorted(rank for rank in set(ranks) if world is not None and rank >= world)
    if beyond:
        named = ", ".join(map(str, beyond))
        yield Problem(
            "training.profile_ranks",
            f"There is no rank {named}: the plan has {world} rank{'s' if world != 1 else ''}, counted from 0.",
            f"Use numbers from 0 to {(world or 1) - 1}.",
        )


RULES = (window_lies_in_the_run, profiled_ranks_exist)
