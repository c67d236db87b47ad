"""Rules between fields that need no plan. One function a rule; each returns its problems and changes nothing.

Batch arithmetic, divisibility, memory and placement are not here: `plan/validate/` knows what a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import RunConfig
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


RULES = (_gpu_fits_the_device, _schedule_fits_the_length, _settings_of_the_chosen_optimizer)
"""Every rule, in the order in which problems are listed."""
