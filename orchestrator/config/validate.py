"""Rules between fields that need no plan. One function a rule; each returns its problems and changes nothing.

Batch arithmetic, divisibility, memory and placement are not here: `plan/validate/` knows what a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import RunConfig
from orchestrator.config.urls import is_url, url_problem
from orchestrator.errors import Problem


def problems_of(config: RunConfig) -> tuple[Problem, ...]:
    """Everything that a well-typed configuration says and cannot mean."""
    return tuple(problem for rule in RULES for problem in rule(config))


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


def _settings_of_the_chosen_optimizer(config: RunConfig) -> Iterator[Problem]:
    if config.optimizer.name == "adamw" and config.optimizer.momentum != 0:
        yield Problem(
            "optimizer.momentum",
            f"optimizer.momentum={config.optimizer.momentum:g} belongs to sgd, but optimizer.name=adamw has its betas.",
            "Set optimizer.betas, or choose optimizer=sgd.",
        )


def _gpu_fits_the_device(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.node_groups:
        return
    if cluster.device == "cuda" and cluster.gpu.name == "CPU":
        yield Problem(
            "cluster.gpu",
            "The cluster computes on GPUs (cluster.device=cuda), but no kind of GPU is named, only the CPU entry.",
            "Choose one with gpu=NAME, or write `gpu: NAME` into the cluster's file; `--help gpu` lists them.",
        )
    if cluster.device == "cpu" and cluster.gpu.peak_tflops.fp16 is not None:
        yield Problem(
            "cluster.gpu",
            f"{cluster.gpu.name} is a GPU, but the cluster computes on CPUs (cluster.device=cpu).",
            "Choose a cluster that has it, as cluster=a100_80gb_1x8 (`--help cluster` lists them), or gpu=cpu.",
        )


def _urls_only_where_they_can_be(config: RunConfig) -> Iterator[Problem]:
    for key, value in (
        ("checkpoint.directory", config.checkpoint.directory),
        ("checkpoint.resume", config.checkpoint.resume),
        ("checkpoint.init_from", config.checkpoint.init_from),
    ):
        if value is not None and (wrong := url_problem(value)) is not None:
            yield Problem(key, f"{key}={value} cannot be used: {wrong[0]}.", wrong[1])
    if is_url(config.run.directory):
        yield Problem(
            "run.directory",
            f"run.directory={config.run.directory} is no folder: logs and metrics are files that grow.",
            "Give a folder; checkpoints alone can go to an object store, with checkpoint.directory.",
        )


def _kept_checkpoints_exist(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    every, kept = checkpoint.every_steps, checkpoint.keep_every_steps
    if kept is not None and (not every or kept % every):
        yield Problem(
            "checkpoint.keep_every_steps",
            f"Checkpoints of every {kept} steps are to be kept, but "
            + (f"one is written every {every} steps." if every else "checkpoint.every_steps=0 writes none by steps."),
            "Use a multiple of checkpoint.every_steps." if every else f"Set checkpoint.every_steps={kept}.",
        )
    if checkpoint.keep_best and not config.training.validate_every_steps:
        yield Problem(
            "checkpoint.keep_best",
            f"The {checkpoint.keep_best} with the lowest validation loss are to be kept, but "
            "training.validate_every_steps=0 validates at the end alone.",
            "Set training.validate_every_steps, or checkpoint.keep_best=0.",
        )


RULES = (
    _gpu_fits_the_device,
    _schedule_fits_the_length,
    _settings_of_the_chosen_optimizer,
    _urls_only_where_they_can_be,
    _kept_checkpoints_exist,
)
"""Every rule, in the order in which problems are listed."""
