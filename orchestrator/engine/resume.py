"""Where a run goes on from: the newest complete checkpoint of its own, or the one it was told, or nothing.

Every rank takes the decision of rank 0, because they may see a shared folder at different times. Refuses a checkpoint
of other data. The record is rewound to the resumed step, so that each step stays one line.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.folder import Checkpoint
from orchestrator.checkpoint.huggingface_folder import is_huggingface
from orchestrator.checkpoint.manifest import problems_of_resuming
from orchestrator.checkpoint.ranks import CheckpointError, Ranks
from orchestrator.checkpoint.read import open_together
from orchestrator.checkpoint.store import load, load_newest
from orchestrator.engine.start_weights import load_huggingface
from orchestrator.engine.state import OPTIONAL, after_loading, state_of
from orchestrator.engine.step import Parts
from orchestrator.errors import Problem, RunError
from orchestrator.plan.rank_task import RankLink, RankTask
from orchestrator.tracking.identity import checkpoint_directory
from orchestrator.tracking.metrics_log import MetricsLog, read_records


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    checkpoint: Checkpoint | None = None
    """None: from the initial weights."""
    loss: float | None = None
    """Training loss of that step, from the record; only rank 0 knows it."""
    validation_loss: float | None = None
    """Last validation loss up to that step, from the record; only rank 0 knows it."""


def resume(task: RankTask, link: RankLink, parts: Parts, data_fingerprint: str, log: MetricsLog | None) -> Resumed:
    """Load what the run goes on from into `parts` and rewind the record (collective).

    The run's own newest complete checkpoint comes first; a path in `checkpoint.resume` only says where a run begins
    that has none yet, `checkpoint.init_from` only where its weights do. `checkpoint.resume=never` counts for the first
    attempt only: a restart always goes on.

    Raises RunError if the checkpoint was trained on other data or the path that was asked for is none.
    """
    asked = task.plan.config.checkpoint.resume
    found: Checkpoint | None = None
    if task.attempt > 1 or asked != "never":
        own = checkpoint_directory(task.plan.config, task.run_directory)
        found, passed_over = load_newest(own, state_of(parts), optional=OPTIONAL)
        if passed_over and task.rank == 0:
            link.report({"kind": "warning", "rank": 0, "message": "\n".join(passed_over)})
        if passed_over and found is None:
            raise RunError(_all_damaged(own, passed_over))
    if found is None and asked not in ("auto", "never"):
        found = _open(asked, "checkpoint.resume")
        load(found, state_of(parts), optional=OPTIONAL)
    if found is not None and (problems := problems_of_resuming(found.manifest, data_fingerprint=data_fingerprint)):
        raise RunError(problems)
    start = task.plan.config.checkpoint.init_from
    if found is None and start is not None and _is_huggingface(start):
        load_huggingface(start, parts, task.plan.config.model)
    elif found is None and start is not None:
        # Its weights only: the optimizer, the step and the position in the data begin anew.
        load(
            _open(start, "checkpoint.init_from"),
            {"model": state_of(parts)["model"]},
            optional=("optimizer.", *OPTIONAL),
            cast=True,
        )
    if found is not None or start is not None:
        after_loading(parts)
    resumed = Resumed() if found is None else Resumed(found.step, found.manifest.tokens, found)
    if log is None:
        return resumed
    log.rewind(resumed.step)
    link.report({"kind": "resumed", "step": resumed.step, "checkpoint": found and str(found.path)})
    return _with_record(resumed, log)


def _all_damaged(directory: str, passed_over: list[str]) -> Problem:
    """A run that has got somewhere does not begin anew by itself, and what is left of it may still be mended."""
    return Problem(
        "checkpoint.directory",
        f"No checkpoint in {directory} can be gone on from. {' '.join(passed_over)}",
        "Mend or restore one of them; or move them away, and the same command begins anew.",
    )


def _is_huggingface(start: str) -> bool:
    """Looked at by rank 0 alone, so that no rank reads another kind of weights than the others."""
    try:
        return Ranks.of().on_first(f"look at {start}", lambda: is_huggingface(start))
    except CheckpointError as error:
        raise RunError(Problem("checkpoint.init_from", str(error), "Give a place that every node sees.")) from error


def _open(path: str, key: str) -> Checkpoint:
    try:
        return open_together(path, Ranks.of())
    except RuntimeError as error:
        raise RunError(Problem(key, str(error), "Give the path of a complete checkpoint.")) from error


def _with_record(resumed: Resumed, log: MetricsLog) -> Resumed:
    """Losses that the record knows, so that a run with no step left to do can still say how it ended."""
    loss = validation_loss = None
    for record in read_records(log.path, lists=False):
        loss = record["loss"]
        validation_loss = record.get("validation_loss", validation_loss)
    return Resumed(
        resumed.step,
        resumed.tokens,
        resumed.checkpoint,
        None if loss is None else float(loss),
        None if validation_loss is None else float(validation_loss),
    )
