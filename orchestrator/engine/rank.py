"""One rank, its whole life: meet the others, build, load, train, say what came of it.

`run_rank` is what `launch/` calls by name in a process of its own; it knows nothing of Ray. Everything it says goes
through the `RankLink`. It leaves the process group behind on purpose: gloo's threads can abort an interpreter that
exits normally, so whoever started the process ends it with `os._exit` once this returns.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.store import CheckpointWriter
from orchestrator.data.dataset import open_tokens
from orchestrator.data.order import START, SampleOrder
from orchestrator.engine.agreement import require_same_data
from orchestrator.engine.anomaly import watch_losses
from orchestrator.engine.build import build
from orchestrator.engine.compute import describe_device, peak_memory_bytes, prepare_process
from orchestrator.engine.feed import Feed, position_of
from orchestrator.engine.mesh import build_mesh
from orchestrator.engine.out_of_memory import Witness, evidence_of_exhaustion, record_allocations
from orchestrator.engine.pace import OwnWork
from orchestrator.engine.profile import StepProfiler
from orchestrator.engine.reach import check_groups
from orchestrator.engine.rendezvous import leave, meet
from orchestrator.engine.resume import resume
from orchestrator.engine.saving import finish_saving, retention_of
from orchestrator.engine.train import Progress, Run, train
from orchestrator.plan.batch import steps_of
from orchestrator.plan.rank_task import RankLink, RankTask
from orchestrator.tracking.identity import checkpoint_directory
from orchestrator.tracking.metrics_log import MetricsLog


@dataclass(slots=True)
class Timings:
    """Where the time to the first step went: seconds by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def run_rank(task: RankTask, link: RankLink) -> None:
    """Live as rank `task.rank` of the plan: returns after `done` was reported, collective with all other ranks.

    Raises whatever goes wrong; whoever started the process reports it as the `error` event. `NotFiniteError` (also a
    FloatingPointError) and `OrchestratorError` would come again on a restart.
    """
    timings = Timings({"until_rank": max(0.0, time.time() - task.command_started)})
    link.beat("starting", 0)
    os.environ.update(task.environment)
    with evidence_of_exhaustion(task) as witness:
        run, progress = _set_up(task, link, timings, witness)
        started = time.time()
        status = train(run, progress)
    link.beat("finishing", progress.step)
    run.profiler.close(progress.step)
    finish_saving(run, progress)
    if progress.first_step_ended is not None:
        timings.seconds["first_step"] = progress.first_step_ended - started
    result = _result(run, progress, timings)
    leave()
    link.report({"kind": "done", "rank": task.rank, "status": status, "step": progress.step, "result": result})


def _set_up(task: RankTask, link: RankLink, timings: Timings, witness: Witness) -> tuple[Run, Progress]:
    """Everything before the first step, in order (collective)."""
    plan, config = task.plan, task.plan.config
    assert plan.parallel is not None, "a plan without degrees is not feasible and never reaches a rank"
    device = prepare_process(task)
    record_allocations(device)
    link.beat("rendezvous", 0)
    with timings.of("process_group"):
        meet(task, link, device)
        mesh = build_mesh(plan.parallel, device.type)
        check_groups(mesh, device, config.fault_tolerance.network_timeout_seconds)
    identity = {"host": socket.gethostname(), "pid": os.getpid(), "device": describe_device(device)}
    link.report({"kind": "ready", "rank": task.rank, **identity})
    link.beat("building", 0)
    with timings.of("build"):
        parts = witness.parts = build(plan, mesh, device)
    with timings.of("data"):
        dataset = open_tokens(config, "train")
        held_out = open_tokens(config, "validation")
        require_same_data(mesh, dataset.fingerprint)
    link.beat("loading", 0)
    with timings.of("load"):
        log = MetricsLog(Path(task.run_directory) / "metrics.jsonl") if task.rank == 0 else None
        resumed = resume(task, link, parts, dataset.fingerprint, log)
        writer = CheckpointWriter(
            checkpoint_directory(config, task.run_directory),
            retention_of(config.checkpoint),
            config.checkpoint.asynchronous,
            protected=() if resumed.checkpoint is None else (resumed.checkpoint.path,),
            raise_on_failure=config.checkpoint.on_failure == "stop",
        )
    order = SampleOrder(config.training.seed, len(dataset))
    feed = Feed(
        dataset=dataset,
        order=order,
        global_batch=config.training.global_batch_size,
        micro_batch=config.training.micro_batch_size,
        mesh=mesh,
        device=device,
        start=START if resumed.checkpoint is None else position_of(resumed.checkpoint.manifest, order),
    )
    steps = steps_of(config.training)
    assert steps is not None, "a plan without a length is not feasible and never reaches a rank"
    validation = held_out if len(held_out) else None
    run = Run(
        task=task,
        link=link,
        parts=parts,
        feed=feed,
        validation=validation,
        writer=writer,
        log=log,
        profiler=StepProfiler(task, link, device),
        losses=watch_losses(config.fault_tolerance, task.left_out, log),
        own=OwnWork(device, plan.parallel),
        steps=steps,
    )
    return run, Progress.after(resumed)


def _result(run: Run, progress: Progress, timings: Timings) -> dict[str, Any]:
    """What the rank's `done` event tells: plain values. Losses are the same on every rank."""
    first = progress.first_step_ended
    return {
        "steps": progress.step,
        "final_loss": progress.loss,
        "validation_loss": progress.validation_loss,
        "peak_memory_bytes": peak_memory_bytes(run.parts.device),
        "attention_kernel": run.parts.attention.kernel,
        "tokens": progress.tokens,
        "tokens_per_second": progress.tokens_per_second,
        "mfu": run.mfu(progress.tokens_per_second),
        "seconds_to_first_step": None if first is None else first - run.task.command_started,
        "checkpoint": progress.checkpoint,
        "timings_seconds": timings.seconds,
    }
