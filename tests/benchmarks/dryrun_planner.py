"""The planner's memory against the simulated engine, over plans of every kind: states, total at the peak, categories.

    python -m tests.benchmarks.dryrun_planner            (about five minutes on two cores; --only WORD for some)

Real widths and few layers, so that weights, activations and logits weigh as in earnest. Prints one line a plan and
what median and worst come to; ends with 1 if a state is not exact, the median is above 5 % or the worst above 10 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from statistics import median
from typing import Any

from orchestrator.plan.make import make_plan
from orchestrator.plan.planned_rank import CATEGORIES, planned_rank
from orchestrator.plan.roles import roles_of
from orchestrator.plan.run_plan import RunPlan
from tests.core import plan_cases

MEDIAN, WORST = 0.05, 0.10
EXACT = ("parameters", "optimizer")
_STEP_COUNTER_BYTES = 4
"""AdamW counts its steps in a tensor of four bytes for each parameter; the planner leaves these out."""

BLOCKS = {**plan_cases.LLAMA_7B, "num_hidden_layers": 4}
NARROW = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "vocab_size": 2048}
"""Activations are most of what is held, as with the small models that a CPU is for."""
FP32 = {"precision": "fp32"}
GPT = {"family": "gpt", "intermediate_size": 16384, "attention_bias": True}


@dataclass(frozen=True)
class Case:
    """One plan, as changes of LLaMA-7B's width with four blocks on A100s that hold anything."""

    name: str
    parallel: dict[str, Any]
    batch: int
    recompute: str = "full"
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    device: str = "cuda"

    def plan(self) -> RunPlan:
        """The plan; fails if the planner refuses it."""
        world = 1
        for degree in ("data", "tensor", "pipeline"):
            world *= self.parallel.get(degree, 1)
        gpu = {**plan_cases.A100_80GB, "memory_gib": 1000}
        config = plan_cases.config(
            BLOCKS,
            model_changes=self.model,
            parallel=self.parallel,
            cluster={"device": self.device, "nodes": -(-world // 8), "gpus_per_node": min(world, 8), "gpu": gpu},
            training={
                "global_batch_size": self.batch,
                "micro_batch_size": 1,
                "activation_checkpointing": self.recompute,
                **self.training,
            },
            optimizer=self.optimizer,
        )
        plan = make_plan(config)
        assert plan.feasible, (self.name, plan.problems)
        return plan


@dataclass(frozen=True)
class Found:
    """What one rank of a case came to, bytes by category."""

    name: str
    rank: int
    simulated: dict[str, int]
    planned: dict[str, int]
    exact: bool

    @property
    def off(self) -> float:
        """Relative difference of the totals."""
        total = sum(self.planned.values())
        return (sum(self.simulated.values()) - total) / total


def cases() -> Iterator[Case]:
    """Every stage, schedule, precision and kind of recomputation, and what else changes what is held."""
    for stage in range(4):
        for recompute in ("none", "selective", "full"):
            for batch in (8, 32):
                yield Case(
                    f"stage {stage}, {recompute}, {batch // 8} micro-batches",
                    {"data": 8, "zero_stage": stage},
                    batch,
                    recompute,
                )
    for precision in ("fp32", "bf16_pure", "fp16_mixed"):
        for stage in range(4):
            yield Case(
                f"{precision}, stage {stage}",
                {"data": 8, "zero_stage": stage},
                16,
                ("none", "selective", "full")[stage % 3],
                training={"precision": precision},
            )
    for schedule, virtual in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv_zero_bubble", 2),
        ("dualpipev", 2),
    ):
        split = schedule in ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
        for stage in range(4):
            yield Case(
                f"{schedule}, stage {stage}",
                {"data": 4, "pipeline": 2, "zero_stage": stage, "schedule": schedule, "virtual_stages": virtual},
                32,
                "none" if split else ("none", "selective", "full", "full")[stage],
                model={"num_hidden_layers": 8},
            )
    for sequence in (True, False):
        for recompute in ("none", "selective", "full"):
            yield Case(
                f"tensor 4, {'sequence parallel, ' if sequence else ''}{recompute}",
                {"data": 2, "tensor": 4, "zero_stage": 1, "sequence_parallel": sequence},
                8,
                recompute,
            )
    three = {"data": 2, "tensor": 2, "pipeline": 2, "sequence_parallel": True}
    for stage, recompute in enumerate(("none", "selective", "full", "selective")):
        yield Case(f"three axes, stage {stage}, {recompute}", {**three, "zero_stage": stage}, 16, recompute)
    yield from _odd_ones()


def _odd_ones() -> Iterator[Case]:
    data = {"data": 8}
    yield Case("hybrid, stage 2", {**data, "zero_stage": 2, "zero_group": 4}, 16)
    yield Case("hybrid, stage 3", {**data, "zero_stage": 3, "zero_group": 2}, 16, "selective")
    yield Case("hybrid, stage 1", {**data, "zero_stage": 1, "zero_group": 4}, 32, "none")
    yield Case("offload, stage 3", {**data, "zero_stage": 3, "offload": "all"}, 16)
    yield Case("offload, stage 2", {**data, "zero_stage": 2, "offload": "all"}, 16, "selective")
    yield Case("offload, one GPU", {"data": 1, "zero_stage": 3, "offload": "all"}, 4)
    yield Case("tied", {**data, "zero_stage": 2}, 16, "none", {"tie_word_embeddings": True})
    yield Case(
        "tied over a pipeline",
        {"data": 4, "pipeline": 2, "zero_stage": 1},
        16,
        "selective",
        {"tie_word_embeddings": True},
    )
    for stage, recompute in enumerate(("none", "selective", "full", "none")):
        yield Case(f"gpt, stage {stage}, {recompute}", {**data, "zero_stage": stage}, 16, recompute, GPT)
    yield Case(
        "gpt, tensor 2 x pipeline 2",
        {"data": 2, "tensor": 2, "pipeline": 2, "zero_stage": 1, "sequence_parallel": True},
        16,
        "selective",
        GPT,
    )
    grouped = {"num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336}
    yield Case("wide vocabulary, grouped queries", {**data, "zero_stage": 3}, 16, "full", grouped)
    yield Case("wide vocabulary, selective", {**data, "zero_stage": 2}, 16, "selective", grouped)
    yield Case("micro-batch 2", {**data, "zero_stage": 2}, 32, "none", training={"micro_batch_size": 2})
    yield Case("SGD with momentum", {**data, "zero_stage": 1}, 16, optimizer={"name": "sgd", "momentum": 0.9})
    yield Case("one GPU", {"data": 1}, 4, "selective")
    for batch in (8, 16, 32):
        for recompute in ("none", "selective", "full"):
            yield Case(f"CPU, stage 0, {recompute}, {batch // 8} micro-batches", data, batch, recompute, device="cpu")
    for batch in (8, 16, 32):
        for recompute in ("none", "full"):
            name = f"CPU, narrow, {recompute}, {batch // 8} micro-batches"
            yield Case(name, data, batch, recompute, NARROW, FP32, device="cpu")
    yield Case("CPU, narrow, BF16", data, 8, "none", NARROW, device="cpu")
    yield Case("CPU, narrow, tied", data, 8, "none", {**NARROW, "tie_word_embeddings": True}, FP32, device="cpu")
    yield Case("CPU, narrow, gpt", data, 8, "none", {**GPT, **NARROW}, FP32, device="cpu")
    yield Case("CPU, narrow, one process", {"data": 1}, 1, "none", NARROW, FP32, device="cpu")
    yield Case("CPU, narrow, tensor 2", {"data": 2, "tensor": 2}, 2, "none", NARROW, FP32, device="cpu")
    yield Case("CPU, narrow, 1f1b", {"data": 2, "pipeline": 2}, 8, "none", NARROW, FP32, device="cpu")
    yield Case("CPU, stage 2", {**data, "zero_stage": 2}, 16, "selective", device="cpu")
    yield Case("CPU, stage 3", {**data, "zero_stage": 3}, 16, "full", device="cpu")


def compare(case: Case) -> list[Found]:
    """Every unlike rank of a case, simulated in this process."""
    from orchestrator.engine.dryrun import simulate

    plan, found = case.plan(), []
    for role in roles_of(plan):
        simulated = simulate(plan, role.rank)
        assert not simulated.failed_while, (case.name, role.rank, simulated.traceback)
        planned = planned_rank(plan, role.pipeline).memory
        # The last of a group may hold less than the first, of which the planner speaks.
        exact = role.place == "last" or all(
            0 <= simulated.memory[name] - planned[name] <= 4096 * _STEP_COUNTER_BYTES for name in EXACT
        )
        found.append(Found(case.name, role.rank, {name: simulated.memory[name] for name in CATEGORIES}, planned, exact))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if the planner is further off than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(arguments)
    chosen = [case for case in cases() if asked.only in case.name]
    rows: list[Found] = []
    print(f"{'plan':44} {'rank':>4} {'GiB':>7} {'off':>6}   categories further off than 5 % of the total")
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("forkserver")) as pool:
        for found in pool.map(compare, chosen):
            rows += found
            print("\n".join(map(_line, found)), flush=True)
    errors = [abs(row.off) for row in rows]
    inexact = [row.name for row in rows if not row.exact]
    print(f"{len(chosen)} plans, {len(rows)} ranks: median {median(errors):.1%}, worst {max(errors):.1%}")
    print(f"states not exact: {', '.join(inexact) or 'none'}")
    return int(bool(inexact) or median(errors) > MEDIAN or max(errors) > WORST)


def _line(row: Found) -> str:
    total = sum(row.planned.values())
    odd = [
        f"{name} {row.simulated[name] / 2**30:.2f} / {row.planned[name] / 2**30:.2f}"
        for name in CATEGORIES
        if abs(row.simulated[name] - row.planned[name]) > 0.05 * total
    ]
    exact = "" if row.exact else " STATES"
    size = sum(row.simulated.values()) / 2**30
    return f"{row.name:44} {row.rank:>4} {size:7.2f} {row.off:+6.1%}{exact}   {', '.join(odd)}"


if __name__ == "__main__":
    sys.exit(main())
