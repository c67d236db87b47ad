"""Draws plans at random from the corners of what may be declared, and holds each against plain torch in FP64.

    python -m tests.engine.sample_corners --seconds 600 --seed 7            small plans as they are drawn
    python -m tests.engine.sample_corners --seconds 600 --seed 7 --reduced  plans of any size, through `verify`

Whatever the planner lets through and the engine's rules do not refuse must run and agree to 1e-9: odd sizes, more ranks
than rows, one token, one sequence, empty micro-batches, listed cuts. `sample_plans.py` draws the ordinary ones. Prints
each plan that fails, with what to run it again; exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.engine.verify import reference_trace
from orchestrator.engine.verify_case import EXACT, Case, cases_of
from orchestrator.engine.verify_compare import compare, initial_weights
from orchestrator.engine.verify_processes import RanksFailedError, run_on_ranks
from orchestrator.engine.verify_rank import RankTrace, run_cases
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.make import make_plan
from orchestrator.plan.reduce import reductions
from orchestrator.plan.run_plan import RunPlan

MOST_RANKS = 8
MOST_MICRO_BATCHES = 8
BATCH = 4
"""Plans of one launch."""
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


def draw(rng: random.Random, *, large: bool = False, ranks: int = MOST_RANKS) -> RunPlan:
    """A plan that planner and engine accept; of at most `ranks` ranks and few micro-batches unless `large`."""
    while True:
        try:
            plan = make_plan(_draw_any(rng, large))
        except ValueError:
            continue
        if not plan.feasible or engine_problems(plan):
            continue
        assert plan.parallel is not None
        if large or (len(plan.ranks) <= ranks and plan.parallel.micro_batches <= MOST_MICRO_BATCHES):
            return plan


def _draw_any(rng: random.Random, large: bool) -> RunConfig:
    family = rng.choice(("llama", "llama", "gpt"))
    heads = rng.choice((1, 2, 3, 4, 6, 8, 12))
    groups = rng.choice([None, *(count for count in range(1, heads + 1) if heads % count == 0)])
    head_dim = rng.choice((None, None, 2, 6))
    length = rng.choice((1, 2, 5, 8, 12))
    degrees = (1, 1, 2, 4, 8, 16) if large else (1, 1, 2, 2, 3, 4, 8)
    pipeline, tensor, data = (rng.choice(degrees) for _ in range(3))
    schedule = rng.choice(SCHEDULES)
    virtual = 1 if schedule in ("gpipe", "1f1b") or pipeline == 1 else rng.choice((1, 2, 2, 3))
    layers = rng.choice((1, 2, 3, 4, 5, 8, 16, 32))
    stage, precision = rng.choice((0, 1, 2, 3)), rng.choice(("fp32", "fp32", "bf16_mixed", "bf16_pure"))
    values: dict[str, Any] = {
        "model": {
            "family": family,
            "hidden_size": heads * rng.choice((2, 4, 6)),
            "intermediate_size": rng.choice((1, 2, 7, 12, 24)),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups if family == "llama" else None,
            "head_dim": head_dim,
            "vocab_size": rng.choice((2, 3, 8, 31, 96)),
            "max_position_embeddings": rng.choice((length, length + 3)),
            "sliding_window": rng.choice((None, None, 1, 3, 50)) if family == "llama" else None,
            "tie_word_embeddings": rng.random() < 0.5,
            "attention_bias": rng.choice((None, True, False)),
            "attention_output_bias": rng.choice((None, None, True, False)),
            "initializer_range": 0.2,
        },
        "cluster": {"device": "cpu", "nodes": "auto", "gpus_per_node": 16, "gpu": {"name": "CPU", "memory_gib": 64}},
        "parallel": {
            "data": data,
            "tensor": tensor,
            "pipeline": pipeline,
            "virtual_stages": virtual,
            "schedule": schedule,
            "zero_stage": stage,
            "zero_group": rng.choice(("auto", "auto", 1, 2, 4)) if stage else "auto",
            "offload": rng.choice(("none", "none", "all")),
            "sequence_parallel": rng.random() < 0.5,
            "stage_layers": _cut(rng, layers, pipeline * virtual),
        },
        "training": {
            "sequence_length": length,
            "global_batch_size": rng.choice((1, 2, 3, 4, 8, 12, 24)),
            "micro_batch_size": rng.choice((1, 1, 2, 3)),
            "steps": 3,
            "precision": precision if large else "fp32",
            "activation_checkpointing": rng.choice(("none", "none", "selective", "full")),
            "gradient_clip": rng.choice((None, 0.05)),
        },
        "optimizer": {"name": rng.choice(("adamw", "sgd")), "lr": 1e-2, "eps": 1e-6, "schedule": {"name": "constant"}},
    }
    if values["optimizer"]["name"] == "sgd":
        values["optimizer"]["momentum"] = rng.choice((0.0, 0.9))
    return RunConfig.model_validate(values)


def _cut(rng: random.Random, layers: int, stages: int) -> Any:
    """Mostly `auto`; sometimes a list, often with all that is left on one stage."""
    if rng.random() < 0.7 or stages > layers or stages == 1:
        return "auto"
    counts = [1] * stages
    counts[rng.randrange(stages)] += layers - stages
    return tuple(counts)


def cases(rng: random.Random, *, reduced: bool, ranks: int) -> list[Case]:
    """What is to be compared of one plan drawn: itself, or its reductions in FP64 and in the plan's own precision."""
    plan = draw(rng, large=reduced, ranks=ranks)
    if reduced:
        return [case for one in reductions(plan) for case in cases_of(one)]
    return [Case("FP64", plan, True, EXACT)]


def on_rank(work: list[Case], *, beat: Any) -> list[RankTrace]:
    return run_cases(work, beat)


def judge(work: list[Case]) -> list[str | None]:
    """What is wrong with each of some plans of as many ranks; None: nothing."""
    try:
        by_rank = run_on_ranks(len(work[0].plan.ranks), on_rank, work)
    except RanksFailedError as error:
        if len(work) == 1:
            return [str(error)]
        return [found for case in work for found in judge([case])]
    found: list[str | None] = []
    for index, case in enumerate(work):
        initial = initial_weights(case)
        outcome = compare(case, [traces[index] for traces in by_rank], initial, reference_trace(case, initial))
        wrong = [f"{one.what} {one.value} {one.where}" for one in outcome.differences if not one.agrees]
        found.append(None if outcome.agrees else "; ".join([*wrong, *outcome.broken[:3]]))
    return found


def shown(plan: RunPlan) -> str:
    """What distinguishes the plan, as overrides."""
    config = plan.config.to_dict()
    return " ".join(
        f"{section}.{key}={value}"
        for section in ("parallel", "model", "training", "optimizer")
        for key, value in config[section].items()
        if value not in (None, "none", "auto", "manual", False) and not isinstance(value, dict)
    )


def main(arguments: list[str] | None = None) -> int:
    """Draw and judge until the time is over; 1 if any plan failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduced", action="store_true", help="plans of any size, through verify's reduction")
    parser.add_argument("--ranks", type=int, default=MOST_RANKS, help="most ranks of a plan (without --reduced)")
    parser.add_argument("--only", type=int, help="number of one plan to run again")
    asked = parser.parse_args(arguments)
    end, number, judged, wrong = time.monotonic() + asked.seconds, 0, 0, 0
    waiting: dict[int, list[tuple[int, Case]]] = defaultdict(list)
    while time.monotonic() < end and (asked.only is None or number <= asked.only):
        if asked.only in (None, number):
            for case in cases(random.Random(f"{asked.seed} {number}"), reduced=asked.reduced, ranks=asked.ranks):
                waiting[len(case.plan.ranks)].append((number, case))
        number += 1
        for ready in [group for group in waiting.values() if len(group) >= BATCH or asked.only == number - 1]:
            for (drawn, case), problem in zip(ready, judge([case for _, case in ready]), strict=True):
                judged += 1
                if problem:
                    wrong += 1
                    flag = " --reduced" if asked.reduced else ""
                    print(f"wrong: plan {drawn} ({case.title}): {problem}\n  {shown(case.plan)}")
                    flag += f" --ranks {asked.ranks}" if asked.ranks != MOST_RANKS else ""
                    print(f"  again: python -m tests.engine.sample_corners{flag} --seed {asked.seed} --only {drawn}")
            print(f"{judged} trainings compared, {wrong} wrong", flush=True)
            ready.clear()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
