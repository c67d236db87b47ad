"""What works but deserves a word: idle GPUs, padding, settings without effect, known numerical traps."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.plan.batch import steps_of
from orchestrator.plan.facts import Facts
from orchestrator.plan.inventory import weakest_gpu


def idle_gpus(facts: Facts) -> Iterator[str]:
    """GPUs that the plan does not use but the cluster has."""
    total = facts.inventory.gpus
    if total is None or facts.world_size is None or facts.world_size >= total:
        return
    idle = total - facts.world_size
    yield (
        f"The plan uses {facts.world_size} of {total} GPUs ({facts.inventory.describe()}); "
        f"{idle} {'stays' if idle == 1 else 'stay'} idle."
    )


def padded_vocabulary(facts: Facts) -> Iterator[str]:
    """Rows that only fill up: legal, kept out of the loss and of checkpoints."""
    vocabulary, tensor = facts.config.model.vocab_size, facts.config.parallel.tensor
    if vocabulary % tensor == 0:
        return
    stage, group = facts.config.parallel.zero_stage, facts.config.parallel.zero_group
    shared = 1 if stage == 0 else (facts.zero_ranks or 1) if group == "auto" else group
    parts = tensor * shared
    padded = -(-vocabulary // parts) * parts
    ranks = f"parallel.tensor={tensor}" + (f" x {shared} ranks of a ZeRO group" if shared > 1 else "")
    yield (
        f"parallel.tensor={tensor} does not divide model.vocab_size={vocabulary}: embedding and head are padded to "
        f"{padded} rows in memory ({ranks}); padded rows never enter the loss and are in no checkpoint."
    )


def sequence_parallel_without_tensor(facts: Facts) -> Iterator[str]:
    """A setting that has no effect."""
    if facts.config.parallel.sequence_parallel and facts.config.parallel.tensor == 1:
        yield "parallel.sequence_parallel=true has no effect with parallel.tensor=1."


def offload_on_a_cpu(facts: Facts) -> Iterator[str]:
    """Host memory is all that a CPU process has."""
    config = facts.config
    if config.parallel.offload == "all" and config.cluster.device == "cpu":
        yield "parallel.offload=all frees nothing with cluster.device=cpu: parameters are in host memory already."


def sharding_over_one(facts: Facts) -> Iterator[str]:
    """A group of one rank keeps full copies whatever the stage."""
    parallel = facts.config.parallel
    if parallel.zero_stage > 0 and parallel.zero_group == 1 and (facts.zero_ranks or 1) > 1:
        yield f"parallel.zero_stage={parallel.zero_stage} with parallel.zero_group=1 keeps full copies, as 0 does."


def unlike_gpus(facts: Facts) -> Iterator[str]:
    """Every rank waits for the weakest."""
    names = sorted({kind.gpu.name for kind in facts.inventory.kinds})
    if len(names) > 1:
        weakest = weakest_gpu(facts.inventory)
        yield (
            f"Unlike GPUs ({', '.join(names)}): every step waits for the slowest and every rank must "
            "fit on the smallest, "
            f"so each counts as the weakest ({weakest.memory_gib:g} GiB)."
        )


def vanishing_updates(facts: Facts) -> Iterator[str]:
    """BF16 weights have 8 significant bits: an update below 1/256 of a weight is rounded away."""
    config = facts.config
    if config.training.precision == "bf16_pure" and config.optimizer.lr < 1e-4:
        yield (
            "training.precision=bf16_pure keeps weights in 8 significant bits; at "
            f"optimizer.lr={config.optimizer.lr:g} "
            "most updates are rounded away. bf16_mixed keeps FP32 master weights."
        )


def unreached_schedule(facts: Facts) -> Iterator[str]:
    """A warm-up or decay that the run does not reach."""
    schedule, steps = facts.config.optimizer.schedule, steps_of(facts.config.training)
    if steps is not None and schedule.warmup_steps >= steps:
        yield (
            f"optimizer.schedule.warmup_steps={schedule.warmup_steps} is not below the run's {steps} "
            "steps: the learning "
            "rate never reaches optimizer.lr."
        )


NOTICES = (
    idle_gpus,
    padded_vocabulary,
    sequence_parallel_without_tensor,
    offload_on_a_cpu,
    sharding_over_one,
    unlike_gpus,
    vanishing_updates,
    unreached_schedule,
)
