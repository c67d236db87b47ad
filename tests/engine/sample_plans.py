"""Draws plans at random and trains each against plain torch in FP64, for as long as one likes.

    python -m tests.engine.sample_plans --seconds 600 --seed 7

Whatever the planner lets through and the engine's rules do not refuse must run and agree to 1e-9. Prints each plan that
does not, with what to run it again; ends with exit code 1 if there was one. Run by hand; the default tests draw a few.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.make import make_plan
from tests.engine.cases import tiny_config
from tests.engine.gloo import RanksFailedError, on_ranks
from tests.engine.parity import Case, RankTrace, expected, run_cases, together
from tests.engine.reference import Recipe

TOLERANCE = 1e-9
MOST_RANKS = 8


def draw(rng: random.Random, number: int) -> Case:
    """A plan of at most `MOST_RANKS` ranks that planner and engine accept, in FP64."""
    while True:
        case = _draw_any(rng, number)
        changes = {**case.changes, "training__gradient_clip": case.recipe.clip}
        try:
            plan = make_plan(tiny_config(**changes))
        except ValueError:
            continue
        if plan.feasible and not engine_problems(plan) and len(plan.ranks) <= MOST_RANKS:
            return case


def _draw_any(rng: random.Random, number: int) -> Case:
    schedule = rng.choice(
        ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
    )
    layers = rng.choice((2, 4, 5, 8))
    family = rng.choice(("llama", "gpt"))
    changes: dict[str, Any] = {
        "model__family": family,
        "model__num_hidden_layers": layers,
        "model__num_key_value_heads": rng.choice((2, 4)) if family == "llama" else None,
        "model__tie_word_embeddings": rng.random() < 0.5,
        "model__vocab_size": rng.choice((96, 97)),
        "parallel__data": rng.choice((1, 2, 4)),
        "parallel__tensor": rng.choice((1, 1, 2, 4)),
        "parallel__pipeline": rng.choice((1, 1, 2, 4)),
        "parallel__sequence_parallel": rng.random() < 0.5,
        "parallel__zero_stage": rng.choice((0, 1, 2, 3)),
        "parallel__zero_group": rng.choice(("auto", "auto", 2)),
        "parallel__offload": rng.choice(("none", "none", "none", "all")),
        "parallel__schedule": schedule,
        "parallel__virtual_stages": 1 if schedule in ("gpipe", "1f1b") else rng.choice((2, 2, 3)),
        "training__global_batch_size": rng.choice((8, 16)),
        "training__micro_batch_size": rng.choice((1, 2, 4)),
        "training__activation_checkpointing": rng.choice(("none", "selective", "full")),
    }
    mask = rng.choice(("none", "ragged", "first rank empty"))
    recipe = Recipe(clip=rng.choice((None, 1.0)))
    return Case(f"plan {number}", changes, mask, recipe, double=True)  # type: ignore[arg-type]


def disagreement(case: Case, ranks: list[RankTrace]) -> str | None:
    """What differs from plain torch; None: nothing."""
    initial, found = together(ranks)
    reference = expected(case, initial)
    if found.losses != pytest.approx(reference.losses, abs=TOLERANCE):
        return f"losses {found.losses} instead of {reference.losses}"
    if any(rank.norms != pytest.approx(reference.norms, rel=TOLERANCE) for rank in ranks):
        return f"norms {found.norms} instead of {reference.norms}"
    for name, weight in reference.weights.items():
        difference = (found.weights[name] - weight).abs().max().item()
        if difference > TOLERANCE:
            return f"{name} differs by {difference}"
    return None


def judge(case: Case) -> str | None:
    """Train a plan and compare; what is wrong with it, or None."""
    plan = case.plan()
    try:
        return disagreement(case, [cases[0] for cases in on_ranks(len(plan.ranks), run_cases, [case])])
    except (RanksFailedError, AssertionError) as error:
        return str(error)


def main(arguments: list[str] | None = None) -> int:
    """Draw and judge until the time is over; 1 if any plan disagreed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of one plan to run again")
    asked = parser.parse_args(arguments)
    end, number, wrong = time.monotonic() + asked.seconds, 0, 0
    while time.monotonic() < end:
        rng = random.Random(f"{asked.seed} {number}")
        case = draw(rng, number)
        if asked.only is None or number == asked.only:
            shown = {key: value for key, value in case.changes.items() if value not in (None, "none", "auto", 1, False)}
            problem = judge(replace(case))
            print(
                f"{'wrong' if problem else 'agrees'}: plan {number} {case.mask} clip {case.recipe.clip} {shown}",
                flush=True,
            )
            if problem:
                wrong += 1
                print(
                    f"{problem}\nagain: python -m tests.engine.sample_plans --seed {asked.seed} --only {number}",
                    flush=True,
                )
        if asked.only is not None and number == asked.only:
            break
        number += 1
    print(f"{number} plans, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
