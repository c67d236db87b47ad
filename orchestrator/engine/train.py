"""The training loop of one rank: one visible loop, with saving, validating and recording as named calls in it.

Everything it needs is passed in (`Run`); every rank runs the same loop and takes the same decisions, because each one
hangs on numbers that all ranks have agreed on (`agreement.py`) or on the step. Next: `step.py` (what a step computes),
`rank.py` (who calls this).
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.checkpoint.store import CheckpointWriter
from orchestrator.data.dataset import TokenDataset
from orchestrator.engine.agreement import Agreement, agree
from orchestrator.engine.anomaly import LossWatch
from orchestrator.engine.compute import peak_memory_bytes, seed_step
from orchestrator.engine.evaluate import Evaluation, evaluate
from orchestrator.engine.feed import Feed
from orchestrator.engine.optimizer import set_learning_rate
from orchestrator.engine.pace import OwnWork
from orchestrator.engine.profile import StepProfiler
from orchestrator.engine.resume import Resumed
from orchestrator.engine.saving import clock_asks, note_checkpoints, save, save_is_due
from orchestrator.engine.schedule import learning_rate
from orchestrator.engine.step import Parts, StepResult, train_step
from orchestrator.plan.rank_task import RankLink, RankTask
from orchestrator.tracking.metrics_log import MetricsLog
from orchestrator.tracking.rates import model_flops_utilization


@dataclass
class Progress:
    """How far the run has come; changes with every step."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Valid tokens trained on, all ranks."""
    loss: float | None = None
    """Of the last step."""
    validation_loss: float | None = None
    """Of the last validation."""
    validated_step: int | None = None
    """Step of the last validation in this process."""
    best_validation_loss: float | None = None
    """Lowest of the run."""
    begun_at: int = 0
    """Step that this process went on from; its checkpoint is there already."""
    saved_step: int | None = None
    """Of the newest checkpoint that is known to be complete; other ranks may know later."""
    checkpoint: str | None = None
    """Path of the newest checkpoint."""
    first_step_ended: float | None = None
    """`time.time()` at the end of this process's first step."""
    timed_tokens: int = 0
    """Tokens of the steps after the first (which pays for warm-up)."""
    timed_seconds: float = 0.0
    last_save: float = field(default_factory=time.monotonic)
    """`time.monotonic()` of the last save."""

    @staticmethod
    def after(resumed: Resumed) -> Progress:
        """Progress of a run that goes on from there."""
        return Progress(
            step=resumed.step,
            tokens=resumed.tokens,
            loss=resumed.loss,
            validation_loss=resumed.validation_loss,
            best_validation_loss=None
            if resumed.checkpoint is None
            else resumed.checkpoint.manifest.best_validation_loss,
            begun_at=resumed.step,
            saved_step=None if resumed.checkpoint is None else resumed.step,
            checkpoint=None if resumed.checkpoint is None else resumed.checkpoint.path,
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Over all steps of this process but its first; None before the second."""
        return self.timed_tokens / self.timed_seconds if self.timed_seconds > 0 else None


@dataclass(frozen=True)
class Run:
    """What a rank trains with."""

    task: RankTask
    link: RankLink
    parts: Parts
    feed: Feed
    validation: TokenDataset | None
    """None: there is nothing to validate on."""
    writer: CheckpointWriter
    log: MetricsLog | None
    """Only rank 0 has one."""
    profiler: StepProfiler
    losses: LossWatch
    """Judges steps that are not applied."""
    own: OwnWork
    """How long this rank's own work takes."""
    steps: int
    """Optimizer steps of the whole run."""

    def mfu(self, tokens_per_second: float | None) -> float | None:
        """Model FLOP/s over the peak of all ranks' devices (0 to 1); None where either is not known."""
        return model_flops_utilization(self.task.plan, tokens_per_second)


def train(run: Run, progress: Progress) -> Literal["finished", "stopped"]:
    """Train from `progress.step` to the last step, or to the first step boundary at which any rank was asked to stop.

    Raises `anomaly.NotFiniteError` on every rank alike when a step is not finite and `fault_tolerance.on_nan` does not
    say to go on.
    """
    config, parts, link = run.task.plan.config, run.parts, run.link
    while progress.step < run.steps:
        step = progress.step + 1
        started = time.perf_counter()
        link.beat("reading", step)
        run.profiler.begin(step)
        with run.own.counted():
            fed = run.feed.step(step)
        stop = link.stop_requested() or run.writer.must_stop
        link.beat("stepping", step)
        run.own.beat = functools.partial(link.beat, "stepping", step)
        agreed = agree(parts.mesh, fed.ids, fed.tokens, stop=stop, save=clock_asks(run, progress))
        if agreed.stop:
            save(run, progress)
            return "stopped"
        seed_step(config, parts.mesh, step)
        rate = learning_rate(config.optimizer, step, run.steps)
        set_learning_rate(parts.optimizer, rate)
        steady = progress.first_step_ended is not None and not run.profiler.covers(step)
        with parts.attention.observing(steady=steady):
            result = train_step(parts, fed.batches, agreed.tokens, loss_limit=run.losses.limit(step), own=run.own)
        parts.attention.tell()
        seconds = time.perf_counter() - started
        _advance(progress, step, agreed.tokens, result, seconds, timed=not run.profiler.covers(step))
        run.own.beat = run.own.rest
        link.pace(run.own.take())
        run.losses.judge(step, result, progress.saved_step)
        every = config.training.validate_every_steps
        evaluation = _validate(run, progress) if (every and step % every == 0) or step == run.steps else None
        _record(run, agreed, result, rate, seconds, step, evaluation)
        if save_is_due(run, progress, evaluation, asked=agreed.save):
            save(run, progress)
        note_checkpoints(run, progress)
        run.profiler.end(step)
    return "finished"


def _advance(progress: Progress, step: int, tokens: int, result: StepResult, seconds: float, *, timed: bool) -> None:
    progress.step = step
    progress.tokens += tokens
    progress.loss = result.loss
    if progress.first_step_ended is None:
        progress.first_step_ended = time.time()
    elif timed:
        progress.timed_tokens += tokens
        progress.timed_seconds += seconds


def _validate(run: Run, progress: Progress) -> Evaluation | None:
    if run.validation is None:
        return None
    training = run.task.plan.config.training
    run.link.beat("validating", progress.step)
    found = evaluate(run.parts, run.validation, training.validation_sequences, training.micro_batch_size)
    progress.validation_loss, progress.validated_step = found.loss, progress.step
    if run.task.rank == 0:
        run.link.report({"kind": "validation", "step": progress.step, "validation_loss": found.loss})
    return found


def _record(
    run: Run,
    agreed: Agreement,
    result: StepResult,
    rate: float,
    seconds: float,
    step: int,
    evaluation: Evaluation | None,
) -> None:
    """One line of `metrics.jsonl`, and the same to the driver: rank 0 alone."""
    if run.log is None:
        return
    rate_of_tokens = agreed.tokens / seconds
    record: dict[str, Any] = {
        "step": step,
        "attempt": run.task.attempt,
        "loss": result.loss,
        "learning_rate": rate,
        "gradient_norm": result.gradient_norm,
        "tokens": agreed.tokens,
        "step_seconds": seconds,
        "tokens_per_second": rate_of_tokens,
        "mfu": run.mfu(rate_of_tokens),
        "memory_bytes": peak_memory_bytes(run.parts.device),
        "attention_kernel": run.parts.attention.kernel,
        "samples": agreed.samples,
        "tokens_per_data_rank": agreed.tokens_per_data_rank,
        "time": time.time(),
    }
    if not result.applied:
        record["skipped"] = True
    if run.profiler.covers(step):
        record["profiled"] = True
    if run.parts.loss_scale is not None:
        record["loss_scale"] = run.parts.loss_scale.value
    if evaluation is not None:
        record["validation_loss"] = evaluation.loss
        record["validation_nats_per_byte"] = evaluation.nats_per_byte
    run.log.append(record)
    run.link.report({"kind": "step", **record})
