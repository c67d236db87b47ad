"""A plan made small enough for a few CPU processes without losing what makes it that plan: values in, values out.

Every degree above 1 stays above 1; schedule, ZeRO stage, hybrid groups, offload, tied weights, recomputation, virtual
stages, an uneven cut, sequence parallelism, accumulation, grouped queries and the family are kept; widths, depth and
lengths become toys. A plan split along more axes than fit becomes several reductions that meet every pair of axes.
Next: `engine/verify.py` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from models.spec import key_value_heads
from orchestrator.config.schema import ModelConfig, Precision, RunConfig
from orchestrator.errors import PlanError, Problem
from orchestrator.plan.batch import divisors
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import ParallelFacts, RunPlan

MOST_PROCESSES = 8
STEPS = 4
"""Optimizer steps of a reduction: stale weights show in the second, optimizer state in the third."""
HEAD_DIM = 8
LAYERS = 3
"""Without a pipeline: a first, a middle and a last one."""
MOST_STAGES = 6
"""Beyond it a rank holds two virtual stages instead of more."""
MOST_LAYERS = 8
SEQUENCE = 16
WINDOW = 5
VOCABULARY = 96
MICRO_BATCHES = 4
SPREAD = 0.2
"""Of the initial weights, so that a few steps of a narrow model move its loss."""
CLIP = 0.5
"""Largest norm where the plan clips: below what the toys' gradients have, so that clipping is at work."""
ADAMW_RATE = 1e-2
SGD_RATE = 0.2
SGD_RATE_UNCLIPPED = 0.02
"""A step of SGD is as long as the gradient: some tens of `CLIP` where nothing clips it."""
EPSILON = 1e-6
"""Least `eps` of AdamW: a smaller one makes steps of gradients that are nothing but rounding (the bias of keys)."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Sizes of the axes that ranks are split along; `replicate` x `shard` are the data-parallel ranks."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.pipeline * self.replicate * self.shard * self.tensor

    def describe(self) -> str:
        """`pipeline 2 x data 2`, `replicate 2 x shard 2 x tensor 2`, or `1 process`."""
        data = {"data": self.replicate * self.shard}
        if self.replicate > 1 < self.shard:
            data = {"replicate": self.replicate, "shard": self.shard}
        named = {"pipeline": self.pipeline, **data, "tensor": self.tensor}
        return " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "1 process"


_AXES = ("pipeline", "replicate", "shard", "tensor")
_TRIPLES = (("pipeline", "shard", "tensor"), ("pipeline", "replicate", "shard"), ("replicate", "shard", "tensor"))
"""Four axes of 2 need 16 processes; in these three threes every axis meets every other one (replicas exist only of
sharded copies, so that `shard` is in all of them)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs from the plan's."""

    key: str
    asked: Any
    reduced: Any


@dataclass(frozen=True, slots=True)
class Reduction:
    """A small plan that stands for a large one."""

    axes: Axes
    plan: RunPlan
    """For CPU processes, in FP32."""
    precision: Precision
    """Of the plan that it stands for."""
    changes: tuple[Change, ...]


def learning_rate(optimizer: str, clip: float | None) -> float:
    """A rate at which a few steps of a toy learn something and do not run away."""
    if optimizer == "adamw":
        return ADAMW_RATE
    return SGD_RATE_UNCLIPPED if clip is None else SGD_RATE


def axes_of(parallel: ParallelFacts) -> Axes:
    """The axes of a plan without context parallelism (which the engine refuses)."""
    shard = parallel.zero_group if parallel.zero_stage > 0 else 1
    return Axes(parallel.pipeline, parallel.data // shard, shard, parallel.tensor)


def reductions(plan: RunPlan) -> tuple[Reduction, ...]:
    """The small plans that together stand for `plan`, which is feasible and runs on the engine.

    Raises PlanError if the planner refuses what came out: then the reduction itself is at fault.
    """
    assert plan.parallel is not None, "a plan without degrees is not feasible and has nothing to reduce"
    return tuple(_reduction(plan, plan.parallel, axes) for axes in reduced_axes(axes_of(plan.parallel)))


def reduced_axes(axes: Axes, most: int = MOST_PROCESSES) -> tuple[Axes, ...]:
    """Axes of at most `most` (8 or more) ranks: as they are if they fit, otherwise as large and even as possible."""
    split = [name for name in _AXES if getattr(axes, name) > 1]
    groups = _TRIPLES if len(split) == 4 and axes.world_size > most else (tuple(split),)
    return tuple(
        _largest({name: getattr(axes, name) if name in group else 1 for name in _AXES}, most) for group in groups
    )


def _largest(sizes: Mapping[str, int], most: int) -> Axes:
    """The most ranks that fit; among equals the most even sizes, then the fewest tensor ranks (the slowest on CPUs)."""
    choices = [_smaller(size, most) for size in sizes.values()]
    fitting = [choice for choice in product(*choices) if prod(choice) <= most]
    best = max(fitting, key=lambda choice: (prod(choice), -max(choice), -choice[-1]))
    return Axes(**dict(zip(sizes, best, strict=True)))


def _smaller(size: int, most: int) -> list[int]:
    return [1] if size == 1 else sorted({2, *(divisor for divisor in divisors(size) if 2 <= divisor <= most)})


def _reduction(plan: RunPlan, parallel: ParallelFacts, axes: Axes) -> Reduction:
    config = plan.config
    counts = _stage_layers(parallel, axes)
    model = _model(
        config, parallel, axes, layers=sum(counts) if counts else min(config.model.num_hidden_layers, LAYERS)
    )
    virtual = len(counts) // axes.pipeline if counts else 1
    sections = {
        "model": model,
        "parallel": {
            "strategy": "manual",
            "data": axes.replicate * axes.shard,
            "tensor": axes.tensor,
            "pipeline": axes.pipeline,
            "context": 1,
            "virtual_stages": virtual,
            "zero_group": axes.shard if parallel.zero_stage > 0 and axes.replicate > 1 else "auto",
            "stage_layers": counts or "auto",
        },
        "training": _training(config, parallel, axes),
        "optimizer": {
            "lr": learning_rate(config.optimizer.name, config.training.gradient_clip),
            "eps": max(EPSILON, config.optimizer.eps),
        },
    }
    values = config.to_dict()
    values["optimizer"]["schedule"] |= {"name": "constant", "warmup_steps": 0}
    for name, section in sections.items():
        values[name] = values[name] | section
    values["cluster"] = {"device": "cpu", "nodes": 1, "gpus_per_node": axes.world_size, "gpu": _PROCESS}
    reduced = make_plan(RunConfig.model_validate(values))
    if reduced.problems:
        raise PlanError([_no_reduction(problem) for problem in reduced.problems])
    return Reduction(axes, reduced, config.training.precision, tuple(_changes(plan, reduced)))


_PROCESS = {"name": "CPU process", "memory_gib": 64}


def _no_reduction(problem: Problem) -> Problem:
    return Problem(
        problem.key,
        f"The plan itself is sound, but the small one that was made from it is not: {problem.message}",
        "This is a defect of `verify`, not of the plan: please report it with the command.",
    )


def _stage_layers(parallel: ParallelFacts, axes: Axes) -> tuple[int, ...]:
    """Layers of every virtual stage, an uneven cut still uneven; empty without a pipeline."""
    if axes.pipeline == 1:
        return ()
    virtual = parallel.virtual_stages
    if virtual > 2 and axes.pipeline * virtual > MOST_STAGES:
        virtual = 2
    asked, stages = [end - first for first, end in parallel.stage_layers], axes.pipeline * virtual
    if stages == len(asked) and sum(asked) <= MOST_LAYERS:
        return tuple(asked)
    least, most = min(asked), max(asked)
    step = (len(asked) - 1) / (stages - 1)
    counts = [1 + (asked[round(stage * step)] > least) for stage in range(stages)]
    if least == most:
        counts = [2 if least > 1 and 2 * stages <= MOST_LAYERS else 1] * stages
    elif len(set(counts)) == 1:
        counts = [1] * stages
        counts[round(asked.index(most) / step)] = 2
    return tuple(counts)


def _model(config: RunConfig, parallel: ParallelFacts, axes: Axes, *, layers: int) -> dict[str, Any]:
    """Narrow sizes with the ratios that matter: grouped queries, a head's width of its own, an uneven vocabulary."""
    model, tensor = config.model, axes.tensor
    shared = key_value_heads(model)
    ratio = model.num_attention_heads // shared
    kept_ratio = 1 if ratio == 1 else 3 if ratio % 2 else 2
    groups = tensor * min(2 if tensor > 1 else 4, shared // parallel.tensor)
    heads = groups * kept_ratio
    own_width = model.head_dim is not None and model.head_dim * model.num_attention_heads != model.hidden_size
    hidden = heads * HEAD_DIM + (HEAD_DIM * heads // 2 if own_width else 0)
    wide = min(4.0, model.intermediate_size / model.hidden_size)
    vocabulary = -(-VOCABULARY // tensor) * tensor
    uneven = model.vocab_size % parallel.tensor if parallel.tensor > 1 else model.vocab_size % 2
    length = _length(config, tensor)
    window = model.sliding_window
    longer = model.max_position_embeddings > config.training.sequence_length
    return {
        "hidden_size": hidden,
        "intermediate_size": max(1, round(wide * hidden / tensor)) * tensor,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": None if model.num_key_value_heads is None else groups,
        "head_dim": None if model.head_dim is None else HEAD_DIM,
        "vocab_size": vocabulary + bool(uneven),
        "max_position_embeddings": 2 * length if longer else length,
        "sliding_window": window if window is None or window >= config.training.sequence_length else WINDOW,
        "rope_scaling": _rope_scaling(model, length),
        "initializer_range": SPREAD,
        "attention_dropout": 0.0,
        "resid_pdrop": 0.0,
    }


def _rope_scaling(model: ModelConfig, length: int) -> dict[str, Any] | None:
    """Stretched frequencies with their turning point inside the toy's sequence."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    return scaling.model_dump(mode="json") | {"original_max_position_embeddings": length}


def _length(config: RunConfig, tensor: int) -> int:
    return -(-SEQUENCE // tensor) * tensor if config.parallel.sequence_parallel else SEQUENCE


def _training(config: RunConfig, parallel: ParallelFacts, axes: Axes) -> dict[str, Any]:
    """Accumulation stays accumulation, and the micro-batches suit the schedule as they did."""
    training = config.training
    count = min(parallel.micro_batches, 2 * axes.pipeline if axes.pipeline > 1 else MICRO_BATCHES)
    micro = min(2, training.micro_batch_size)
    return {
        "sequence_length": _length(config, axes.tensor),
        "global_batch_size": count * micro * axes.replicate * axes.shard,
        "micro_batch_size": micro,
        "steps": STEPS,
        "tokens": None,
        "precision": "fp32",
        "gradient_clip": None if training.gradient_clip is None else min(CLIP, training.gradient_clip),
        "compile": False,
    }


def _changes(plan: RunPlan, reduced: RunPlan) -> Iterator[Change]:
    """What differs, key by key; the degrees as they were decided, `auto` resolved. Precision is told by itself."""
    before, after = _told(plan), _told(reduced)
    for key, value in before.items():
        if value != after.get(key) and key not in _OTHERWISE_TOLD:
            yield Change(key, value, after.get(key))


_OTHERWISE_TOLD = ("training.precision", "training.tokens", "parallel.strategy", "parallel.context")


def _told(plan: RunPlan) -> dict[str, Any]:
    config, parallel = plan.config.to_dict(), plan.parallel
    assert parallel is not None
    values = dict(_flat({name: config[name] for name in ("parallel", "model", "training", "optimizer")}))
    axes = axes_of(parallel)
    values["parallel.data"] = parallel.data
    values["parallel.zero_group"] = axes.shard if parallel.zero_stage > 0 else "auto"
    values["parallel.stage_layers"] = [end - first for first, end in parallel.stage_layers]
    values["micro-batches of a step"] = parallel.micro_batches
    values["model.num_key_value_heads"] = key_value_heads(plan.config.model)
    return values


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
