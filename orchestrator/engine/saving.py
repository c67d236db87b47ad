"""When a rank saves, what it hands to the checkpoints' writer, and what becomes of saves that have ended.

Every rank decides alike: by the step, by what all agreed on in the step's collective (rank 0's clock, a stop, a failed
save), or by a validation loss that all have computed together. Writing is `checkpoint/store.py`'s business.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from orchestrator.checkpoint.manifest import Losses, describe
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.store import CheckpointError
from orchestrator.config.schema.run import CheckpointConfig
from orchestrator.engine.feed import position_after
from orchestrator.engine.state import state_of
from orchestrator.errors import Problem, RunError

if TYPE_CHECKING:
    from orchestrator.engine.evaluate import Evaluation
    from orchestrator.engine.train import Progress, Run


def retention_of(config: CheckpointConfig) -> Retention:
    """Which checkpoints the configuration keeps."""
    return Retention(config.keep_last, config.keep_every_steps, config.keep_best)


def clock_asks(run: Run, progress: Progress) -> bool:
    """Whether a checkpoint is due by time; rank 0's clock alone counts, the others follow the agreement."""
    minutes = run.task.plan.config.checkpoint.every_minutes
    return run.task.rank == 0 and minutes is not None and time.monotonic() - progress.last_save >= 60 * minutes


def save_is_due(run: Run, progress: Progress, evaluation: Evaluation | None, *, asked: bool) -> bool:
    """Whether a checkpoint follows this step; takes note of the best validation loss. The same on every rank.

    Args:
        run: what the rank trains with.
        progress: as it stands after the step.
        evaluation: of this step, if it was validated.
        asked: whether the agreement of this step asks for one.
    """
    config = run.task.plan.config.checkpoint
    best = progress.best_validation_loss
    improved = evaluation is not None and (best is None or evaluation.loss < best)
    if evaluation is not None and improved:
        progress.best_validation_loss = evaluation.loss
    by_step = config.every_steps and progress.step % config.every_steps == 0
    return bool(asked or by_step or progress.step == run.steps or (config.keep_best and improved))


def save(run: Run, progress: Progress) -> None:
    """Write a checkpoint of the steps done (collective); the writer leaves out a step that it has saved already.

    Raises RunError on every rank when a save has failed and `checkpoint.on_failure` says to stop.
    """
    if progress.step == progress.begun_at:
        return
    run.link.beat("saving", progress.step)
    validated = progress.validated_step == progress.step
    manifest = describe(
        run.task.plan,
        step=progress.step,
        tokens=progress.tokens,
        data_fingerprint=run.feed.dataset.fingerprint,
        data_position=position_after(run.feed, progress.step),
        losses=Losses(progress.loss, progress.validation_loss if validated else None, progress.best_validation_loss),
    )
    try:
        run.writer.save(progress.step, state_of(run.parts), manifest)
    except CheckpointError as error:
        raise _stopped_by(error, progress) from error
    progress.last_save = time.monotonic()


def finish_saving(run: Run, progress: Progress) -> None:
    """Wait for the save in flight and take note of it. Collective. Raises as `save` does."""
    try:
        run.writer.close()
    except CheckpointError as error:
        raise _stopped_by(error, progress) from error
    finally:
        note_checkpoints(run, progress)


def note_checkpoints(run: Run, progress: Progress) -> None:
    """Take note of saves that have ended meanwhile; rank 0 tells the driver. Never blocks, not collective."""
    for outcome in run.writer.take_outcomes():
        if outcome.path is not None:
            progress.checkpoint = outcome.path
            progress.saved_step = outcome.step
        if run.task.rank == 0:
            event = {"kind": "checkpoint", "step": outcome.step, "path": outcome.path, "error": outcome.error}
            seconds = {"blocked_seconds": outcome.blocked_seconds, "write_seconds": outcome.write_seconds}
            stops = run.task.plan.config.checkpoint.on_failure == "stop"
            run.link.report({**event, **seconds, "size_bytes": outcome.size_bytes, "stops": stops})


def _stopped_by(error: CheckpointError, progress: Progress) -> RunError:
    kept = f"the checkpoint of step {progress.saved_step} is as it was" if progress.saved_step else "there is none yet"
    return RunError(
        Problem(
            "checkpoint.on_failure",
            f"A checkpoint could not be written: {error}. checkpoint.on_failure=stop ends the run ({kept}).",
            "Make room or mend the storage and give the same command again; or use checkpoint.on_failure=continue.",
        )
    )
