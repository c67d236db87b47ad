"""One rank of any plan, simulated: the engine's own set-up and step on tensors without numbers, counted.

`simulate` is what `cli/dryrun.py` calls by name in a process of its own; it takes over the process's default process
group. What differs from a real step is in `dryrun_stand_ins.py`, what is counted in `account.py`. A failure is a value
too: what the rank was doing and what torch said.
"""

from __future__ import annotations

import gc
import resource
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from orchestrator.engine.account import Account, Calls, Watch
from orchestrator.engine.build import build
from orchestrator.engine.dryrun_stand_ins import stand_ins
from orchestrator.engine.mesh import build_mesh
from orchestrator.engine.step import MicroBatch, Parts, train_step
from orchestrator.plan.roles import extended, simulated_micro_batches
from orchestrator.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """What one rank does in a steady step, plain values."""

    rank: int
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes on the device at the peak, by category."""
    between_steps: dict[str, int] = field(default_factory=dict)
    """Bytes on the device when a step has ended."""
    host_bytes: int = 0
    """States in host memory at the peak (offload)."""
    collectives: tuple[dict[str, Any], ...] = ()
    """One entry an axis and kind: axis, kind, calls, bytes (what the rank hands in)."""
    flops: int = 0
    micro_batches: tuple[int, ...] = ()
    """With how many micro-batches steps were simulated; two numbers: the rest of the step follows from them."""
    seconds: float = 0.0
    resident_bytes: int = 0
    """Most real memory of the process that simulated."""
    failed_while: str = ""
    """What the rank was doing when it failed; empty: it did not fail."""
    error: str = ""
    """What was raised then."""
    traceback: str = ""


def simulate(plan: RunPlan, rank: int) -> SimulatedRank:
    """Count a steady step of a rank (the first is discarded). Never raises for what the engine refuses.

    `plan` has degrees. Not to be called in a process that has a process group.
    """
    started, doing = time.monotonic(), ["building its part of the model"]
    # torch wraps SDPA's and FSDP's odds and ends in warnings that a real run shows as well.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        assert plan.parallel is not None
        counts = simulated_micro_batches(plan.parallel)
        accounts = _accounts(plan, rank, counts, doing)
    except Exception as error:  # whatever torch or the engine refuses is a finding about the plan
        return SimulatedRank(
            rank,
            failed_while=doing[-1],
            error=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
            seconds=time.monotonic() - started,
        )
    found = accounts[-1] if len(counts) == 1 else _extend(accounts, counts, plan.parallel.micro_batches)
    return SimulatedRank(
        rank,
        memory={str(name): size for name, size in found.peak.items()},
        between_steps={str(name): size for name, size in found.end.items()},
        host_bytes=found.host_bytes,
        collectives=tuple(
            {"axis": axis, "kind": kind, "calls": calls.calls, "bytes": calls.input_bytes}
            for (axis, kind), calls in sorted(found.collectives.items())
        ),
        flops=found.flops,
        micro_batches=counts,
        seconds=time.monotonic() - started,
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _accounts(plan: RunPlan, rank: int, counts: tuple[int, ...], doing: list[str]) -> list[Account]:
    """An account of a step with each number of micro-batches."""
    assert plan.parallel is not None
    if plan.parallel.pipeline == 1:
        return _run(plan, rank, counts, doing)
    # A pipeline's schedule is made for one number of micro-batches.
    return [
        account
        for count in counts
        for account in _run(replace(plan, parallel=replace(plan.parallel, micro_batches=count)), rank, (count,), doing)
    ]


def _run(plan: RunPlan, rank: int, counts: tuple[int, ...], doing: list[str]) -> list[Account]:
    assert plan.parallel is not None
    training, accounts = plan.config.training, []
    shape = (training.micro_batch_size, training.sequence_length)
    with stand_ins(plan, rank) as device:
        parts = build(plan, build_mesh(plan.parallel, "cpu"), device)
        with Watch(parts, states_on_host=plan.config.parallel.offload == "all") as watch:
            doing.append("running its first step")
            with _first_step_of(parts, counts[0]) as first:
                train_step(parts, _batches(first, shape, device), first)
            doing.append("running a step")
            for count in counts:
                batches = _batches(count, shape, device)
                watch.begin()
                train_step(parts, batches, count)
                accounts.append(watch.finish())
                del batches
        del parts, watch
    gc.collect()
    return accounts


@contextmanager
def _first_step_of(parts: Parts, count: int) -> Iterator[int]:
    """Inside, a step has as few micro-batches as make all that is there from then on; gives their number.

    `count`: of the steps that follow.
    """
    if parts.pipeline is None:
        yield 1
        return
    schedule = parts.pipeline.schedule
    if not isinstance(schedule, PipelineScheduleSingle):
        yield count  # the order of these is made for their number of micro-batches
        return
    stage = schedule._stage
    stage.has_backward = True
    schedule._initialize_stage((), {})  # type: ignore[no-untyped-call]
    for number in range(count):
        # What each micro-batch is received in is told by that.
        for receive in (*stage.get_fwd_recv_ops(number), *stage.get_bwd_recv_ops(number)):
            receive.op(receive.tensor, group=receive.group, group_src=receive.group_peer)
    with patch.object(schedule, "_n_microbatches", 1), patch.object(stage, "_micro_batches", 1):
        yield 1


def _batches(count: int, shape: tuple[int, int], device: torch.device) -> list[MicroBatch]:
    """Micro-batches as the feed cuts them: inputs and labels are views of the same rows."""
    rows = [torch.zeros(shape[0], shape[1] + 1, dtype=torch.int64, device=device) for _ in range(count)]
    return [MicroBatch(tokens[:, :-1], tokens[:, 1:]) for tokens in rows]


def _extend(accounts: list[Account], counts: tuple[int, ...], count: int) -> Account:
    """The account of a step with `count` micro-batches from those of two smaller ones."""
    low, high = accounts
    pair = (counts[0], counts[1])

    def whole(few: int, more: int) -> int:
        return round(extended(few, more, pair, count))

    return Account(
        start=high.start,
        host_bytes=high.host_bytes,
        peak={name: whole(low.peak.get(name, 0), size) for name, size in high.peak.items()},
        end={name: whole(low.end.get(name, 0), size) for name, size in high.end.items()},
        collectives={
            name: Calls(whole(few.calls, more.calls), whole(few.input_bytes, more.input_bytes))
            for name, more in high.collectives.items()
            for few in [low.collectives.get(name, Calls())]
        },
        flops=whole(low.flops, high.flops),
    )


def plain(rank: SimulatedRank) -> dict[str, Any]:
    """The figures as plain values."""
    return asdict(rank)
