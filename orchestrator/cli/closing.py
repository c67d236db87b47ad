"""The first and the last lines of a training: what is run, how it ended, where everything lies, how to go on.

The only reading done here is the corpus, for the baseline that a validation loss is compared with.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.manifest import step_of
from orchestrator.cli.invocation import Invocation
from orchestrator.cli.progress import span
from orchestrator.errors import OrchestratorError
from orchestrator.plan.batch import steps_of
from orchestrator.plan.run_plan import RunPlan

if TYPE_CHECKING:
    from orchestrator.launch.request import LaunchOutcome
    from orchestrator.tracking.forward import TrackingResult
    from orchestrator.tracking.run_directory import RunDirectory


def opening_lines(plan: RunPlan, directory: RunDirectory) -> list[str]:
    """What is about to run, in a few lines."""
    config, parallel, model = plan.config, plan.parallel, plan.model
    assert parallel is not None and model is not None, "only feasible plans are run"
    training = config.training
    degrees = [f"{axis} {getattr(parallel, axis)}" for axis in ("data", "tensor", "pipeline", "context")]
    used = [text for text in degrees if not text.endswith(" 1")] or ["data 1"]
    lines = [
        f"{directory.name}: {config.model.family}, {model.parameters:,} parameters, {training.precision}, "
        f"on {parallel.world_size} x {config.cluster.gpu.name} ({' x '.join(used)}, ZeRO {parallel.zero_stage})",
        f"{steps_of(training):,} steps of {training.global_batch_size} sequences of {training.sequence_length} tokens "
        f"(data ranks {parallel.data} x micro-batches {parallel.micro_batches} of {training.micro_batch_size})",
    ]
    if directory.continues:
        lines.append(f"continues the unfinished run in {directory.path}")
    lines += [
        f"  changed since: {key} was {_shown(old)}, is {_shown(new)}" for key, (old, new) in directory.changes.items()
    ]
    return lines


def closing_lines(
    plan: RunPlan,
    directory: RunDirectory,
    outcome: LaunchOutcome,
    summary: dict[str, Any],
    tracked: TrackingResult | None,
    invocation: Invocation,
    save_error: str = "",
) -> list[str]:
    """How it ended and where to look. The run's folder itself is printed after these.

    `save_error` is why the last checkpoint that was tried could not be written; empty when it could.
    """
    lines = ["", _verdict(summary, outcome)]
    if outcome.status == "finished":
        lines += loss_lines(plan, summary)
    lines += unsaved_lines(summary, save_error)
    rows = [
        ("attention", attention_row(summary)),
        ("checkpoint", summary["checkpoint"] or "none was saved"),
        ("record", f"{directory.path}/summary.json, beside metrics.jsonl, plan.json, config.yaml, logs/"),
        *_tracking_rows(directory, tracked),
        ("to go on", how_to_continue(outcome.status, summary, plan, invocation)),
    ]
    return [*lines, *(f"{name:<11} {text}" for name, text in rows if text)]


def unsaved_lines(summary: dict[str, Any], save_error: str) -> list[str]:
    """Which of the steps done no checkpoint has, and why; nothing where the newest one has all."""
    first, last = (saved_step(summary) or 0) + 1, summary["steps"]
    if first > last:
        return []
    what = f"step {last} is" if first == last else f"steps {first} to {last} are"
    return [f"{what} in no checkpoint" + (f": it could not be written ({save_error})" if save_error else "")]


def saved_step(summary: dict[str, Any]) -> int | None:
    """Step of the newest checkpoint; None: there is none."""
    return None if summary["checkpoint"] is None else step_of(summary["checkpoint"].rpartition("/")[2])


_KERNELS = {
    "flash_cpu": "torch's flash kernel for CPUs",
    "flash": "FlashAttention",
    "efficient": "the memory-efficient kernel",
    "cudnn": "cuDNN's fused kernel",
    "math": "no fused kernel: scores are kept as a matrix",
}


def attention_row(summary: dict[str, Any]) -> str:
    """Which kernel attention ran in, in words; empty where no rank has said."""
    names = (summary.get("attention_kernel") or "").split(", ")
    return "; ".join(f"{_KERNELS.get(name, name)} ({name})" for name in names if name)


def problems_opening(status: str) -> str:
    """The line above the problems of a run that had started."""
    return "The run failed." if status == "failed" else "The run stopped, but not as it should."


def loss_lines(plan: RunPlan, summary: dict[str, Any]) -> list[str]:
    """The validation loss, a token and a byte, beside what counting token pairs reaches."""
    per_token, per_byte = summary["validation_loss"], summary["validation_nats_per_byte"]
    if per_token is None:
        return []
    if per_byte is None:
        return [f"validation loss {per_token:.4f} nats a token"]
    both = f"validation loss {per_token:.4f} nats a token, {per_byte:.4f} nats a byte"
    from orchestrator.data.baseline import bigram_baseline

    try:
        baseline = bigram_baseline(plan.config)
    except (OrchestratorError, OSError) as error:
        return [f"{both} (no baseline: {error})"]
    if baseline.nats_per_byte is None:
        return [f"{both} (no bigram baseline: {baseline.reason})"]
    change = 1 - per_byte / baseline.nats_per_byte
    side = "below" if change >= 0 else "above"
    return [
        f"{both}, {abs(change):.0%} {side} the {baseline.nats_per_byte:.4f} of a "
        f"bigram model of the same tokens (add-k, k = {baseline.smoothing:.3g})"
    ]


def how_to_continue(status: str, summary: dict[str, Any], plan: RunPlan, invocation: Invocation) -> str:
    """The command that goes on from here."""
    same = invocation.words("train")
    if status != "finished":
        return f"the same command continues it: {same}" if summary["checkpoint"] else f"the same command: {same}"
    steps = steps_of(plan.config.training)
    if not summary["checkpoint"] or steps is None:
        return ""
    replaced = ("training.steps", "training.tokens", "checkpoint.resume", "checkpoint.init_from")
    kept = [word for word in invocation.overrides if word.lstrip("+~").partition("=")[0] not in replaced]
    if plan.config.checkpoint.init_from is not None:
        kept.append("checkpoint.init_from=null")  # the checkpoint has its weights
    # What is in no checkpoint is computed again before anything is added.
    length = steps if (saved_step(summary) or steps) < summary["steps"] else 2 * steps
    longer = Invocation(
        overrides=[*kept, f"training.steps={length}", f"checkpoint.resume={summary['checkpoint']}"],
        config_directory=invocation.config_directory,
    )
    return longer.words("train")


def _verdict(summary: dict[str, Any], outcome: LaunchOutcome) -> str:
    parts = [f"{outcome.status} after step {summary['steps']}"]
    if summary["tokens_per_second"]:
        parts.append(f"{summary['tokens_per_second']:,.0f} tokens/s")
    if summary["mfu"]:
        parts.append(f"{summary['mfu']:.1%} of the peak")
    if summary["seconds_to_first_step"]:
        parts.append(f"first step after {span(summary['seconds_to_first_step'])}")
    if len(outcome.attempts) > 1:
        parts.append(f"{len(outcome.attempts) - 1} restart{'s' if len(outcome.attempts) > 2 else ''}")
    return ", ".join(parts)


def _tracking_rows(directory: RunDirectory, tracked: TrackingResult | None) -> list[tuple[str, str]]:
    if tracked is None:
        command = f"python -m orchestrator.tracking.forward {shlex.quote(str(directory.path))}"
        return [("MLflow", f"interrupted; the rest is sent by: {command}")]
    rows = [("MLflow run", tracked.run_id)] if tracked.run_id else []
    return [*rows, ("look at it" if tracked.complete else "not sent", tracked.message)]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
