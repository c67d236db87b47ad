"""Rules between fields that need no plan. One function a rule; each returns its problems and changes nothing.

Divisibility, memory and placement are not here: `plan/` knows what a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem


def problems_of(config: RunConfig) -> tuple[Problem, ...]:
    """Everything that a well-typed configuration says and cannot mean."""
    return tuple(problem for rule in RULES for problem in rule(config))


def _length_is_given_once(config: RunConfig) -> Iterator[Problem]:
    steps, tokens = config.training.steps, config.training.tokens
    if steps is None and tokens is None:
        yield Problem(
            "training.steps",
            "Neither training.steps nor training.tokens says how long to train.",
            "Give one of them, for example training.steps=1000.",
        )
    elif steps is not None and tokens is not None:
        yield Problem(
            "training.steps",
            f"Both training.steps={steps} and training.tokens={tokens} say how long to train.",
            "Set one of them to null.",
        )


def _sequence_fits_the_positions(config: RunConfig) -> Iterator[Problem]:
    length, limit = config.training.sequence_length, config.model.max_position_embeddings
    if length > limit:
        yield Problem(
            "training.sequence_length",
            f"{length} tokens are asked for, but model.max_position_embeddings={limit}.",
            f"Use at most {limit}, or a model with more positions.",
        )


def _text_needs_a_path(config: RunConfig) -> Iterator[Problem]:
    if config.data.source == "text" and config.data.path is None:
        yield Problem(
            "data.path",
            "data.source=text reads files, but no path is given.",
            "Give data.path=FOLDER, a file or a glob.",
        )
    if config.data.source != "text" and config.data.path is not None:
        yield Problem(
            "data.path",
            f"data.path={config.data.path} is given, but data.source={config.data.source} does not read it.",
            "Add data=text, or leave data.path out.",
        )


def _schedule_fits_the_length(config: RunConfig) -> Iterator[Problem]:
    warmup, decay, steps = (
        config.optimizer.schedule.warmup_steps,
        config.optimizer.schedule.decay_steps,
        config.training.steps,
    )
    if decay is not None and decay < warmup:
        yield Problem(
            "optimizer.schedule.decay_steps",
            f"The rate would reach its minimum at step {decay}, before the warm-up ends at {warmup}.",
            f"Use at least {warmup}, or a shorter optimizer.schedule.warmup_steps.",
        )
    if decay is not None and steps is not None and decay > steps:
        yield Problem(
            "optimizer.schedule.decay_steps",
            f"The rate would reach its minimum at step {decay}, after the last step {steps}.",
            f"Use at most {steps}, or null for the last step.",
        )


def _v100_class_has_no_bf16(config: RunConfig) -> Iterator[Problem]:
    gpu, precision = config.cluster.gpu, config.training.precision
    peaks = gpu.peak_tflops
    if (
        config.cluster.device == "cuda"
        and precision.startswith("bf16")
        and peaks.bf16 is None
        and peaks.fp16 is not None
    ):
        yield Problem(
            "training.precision",
            f"{precision} is asked for, but {gpu.name} has no BF16 (cluster.gpu.peak_tflops.bf16 is null, fp16 is not).",
            "Use training.precision=fp16_mixed or fp32, or another GPU.",
        )


RULES = (
    _length_is_given_once,
    _sequence_fits_the_positions,
    _text_needs_a_path,
    _schedule_fits_the_length,
    _v100_class_has_no_bf16,
)
"""Every rule, in the order in which problems are listed."""
