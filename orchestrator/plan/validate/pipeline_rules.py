"""Rules of the pipeline: stages, cut and what each schedule needs."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.errors import Problem
from orchestrator.plan.facts import Facts
from orchestrator.plan.stages import V_SHAPED
from orchestrator.plan.validate.size_rules import MOST_STAGES
from orchestrator.plan.validate.wording import one_of

_SINGLE_STAGE = frozenset({"gpipe", "1f1b"})


def stages_fit_the_layers(facts: Facts) -> Iterator[Problem]:
    """Each virtual stage holds at least one layer."""
    parallel, layers = facts.config.parallel, facts.config.model.num_hidden_layers
    if facts.stages <= layers:
        return
    per_rank = "" if parallel.virtual_stages == 1 else f" x virtual_stages {parallel.virtual_stages}"
    key = (
        "parallel.pipeline" if parallel.pipeline > layers or parallel.virtual_stages == 1 else "parallel.virtual_stages"
    )
    most = layers // parallel.virtual_stages
    fixes = [f"parallel.pipeline={most} or less"] if most else []
    if parallel.virtual_stages > 1 and layers >= parallel.pipeline:
        fixes.append(f"parallel.virtual_stages={layers // parallel.pipeline} or less")
    yield Problem(
        key,
        f"pipeline {parallel.pipeline}{per_rank} = {facts.stages} stages, but the model has {layers} "
        "layers and each stage "
        "holds at least one.",
        f"Use {' or '.join(fixes) or f'at most {layers} stages'}.",
    )


def stages_can_be_simulated(facts: Facts) -> Iterator[Problem]:
    """A pipeline is timed by walking through its schedule, which has limits."""
    parallel = facts.config.parallel
    if MOST_STAGES < facts.stages <= facts.config.model.num_hidden_layers:
        yield Problem(
            "parallel.virtual_stages",
            f"pipeline {parallel.pipeline} x virtual_stages {parallel.virtual_stages} = {facts.stages} stages; at most "
            f"{MOST_STAGES} are planned for.",
            f"Use parallel.virtual_stages={MOST_STAGES // parallel.pipeline} or less.",
        )


def listed_layers_add_up(facts: Facts) -> Iterator[Problem]:
    """A list of layers has one entry a stage, each at least 1, and adds up to the model."""
    parallel, layers = facts.config.parallel, facts.config.model.num_hidden_layers
    listed = parallel.stage_layers
    if listed == "auto":
        return
    key = "parallel.stage_layers"
    if len(listed) != facts.stages:
        yield Problem(
            key,
            f"{len(listed)} entries are given, but pipeline {parallel.pipeline} x virtual_stages "
            f"{parallel.virtual_stages} makes {facts.stages} stages.",
            f"Give {facts.stages} numbers, or auto.",
        )
    if any(count < 1 for count in listed):
        yield Problem(key, f"{list(listed)} has a stage without a layer.", "Give each stage at least 1.")
    if sum(listed) != layers:
        difference = layers - sum(listed)
        change = f"Add {difference}" if difference > 0 else f"Take away {-difference}"
        yield Problem(
            key,
            f"{list(listed)} adds up to {sum(listed)} layers, but the model has {layers}.",
            f"{change}, or use auto, which balances all {layers}.",
        )


def virtual_stages_fit_the_schedule(facts: Facts) -> Iterator[Problem]:
    """Single-stage schedules have one stage a rank, V-shaped ones two, interleaved 1F1B several."""
    parallel = facts.config.parallel
    schedule, virtual, key = parallel.schedule, parallel.virtual_stages, "parallel.virtual_stages"
    if parallel.pipeline == 1:
        if virtual > 1:
            yield Problem(
                key,
                f"{virtual} stages a rank need a pipeline, and parallel.pipeline=1.",
                "Use parallel.virtual_stages=1, or a parallel.pipeline of at least 2.",
            )
        return
    if schedule in _SINGLE_STAGE and virtual != 1:
        yield Problem(
            key,
            f"parallel.schedule={schedule} has one stage a rank, and {virtual} are asked.",
            "Use parallel.virtual_stages=1, or parallel.schedule=interleaved_1f1b.",
        )
    elif schedule in V_SHAPED and virtual != 2:
        yield Problem(
            key,
            f"parallel.schedule={schedule} is V-shaped: each rank holds exactly 2 stages, and {virtual} is asked.",
            "Use parallel.virtual_stages=2.",
        )
    elif schedule == "interleaved_1f1b" and virtual == 1:
        yield Problem(
            key,
            "parallel.schedule=interleaved_1f1b with one stage a rank is plain 1f1b.",
            "Use parallel.virtual_stages=2 or more, or parallel.schedule=1f1b.",
        )


def micro_batches_suit_the_schedule(facts: Facts) -> Iterator[Problem]:
    """How many micro-batches each schedule needs (the same conditions as torch's schedules)."""
    parallel, count = facts.config.parallel, facts.micro_batches
    if parallel.pipeline == 1 or count is None:
        return
    pipeline, schedule = parallel.pipeline, parallel.schedule
    if schedule == "1f1b" and count < pipeline:
        need, valid = f"at least parallel.pipeline = {pipeline}", (pipeline, 2 * pipeline)
    elif schedule == "dualpipev" and count < 2 * pipeline:
        need, valid = f"at least 2 x parallel.pipeline = {2 * pipeline}", (2 * pipeline, 4 * pipeline)
    elif schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and count % max(1, count // pipeline):
        below = count // pipeline * pipeline
        need, valid = f"a whole number in each of {count // pipeline} rounds", (below, below + pipeline)
    else:
        return
    training, data = facts.config.training, facts.data or 1
    batches = [number * data * training.micro_batch_size for number in valid]
    yield Problem(
        "training.global_batch_size",
        f"parallel.schedule={schedule} needs {need} micro-batches, but global_batch_size "
        f"{training.global_batch_size} / "
        f"(micro_batch_size {training.micro_batch_size} x data {data}) = {count}.",
        f"Use training.global_batch_size={one_of(batches)} ({one_of(valid)} micro-batches), a smaller micro-batch, or "
        "parallel.schedule=gpipe, which takes any number.",
    )


RULES = (
    stages_fit_the_layers,
    stages_can_be_simulated,
    listed_layers_add_up,
    virtual_stages_fit_the_schedule,
    micro_batches_suit_the_schedule,
)
