"""Rules of precision, kernels and device: what the kind of GPU can do."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.errors import Problem
from orchestrator.plan.facts import Facts
from orchestrator.plan.schedules import SPLIT_BACKWARDS


def gpu_has_the_precision(facts: Facts) -> Iterator[Problem]:
    """BF16 on a GPU whose entry gives an FP16 peak and no BF16 peak (V100) would be emulated or fail."""
    config = facts.config
    if config.cluster.device == "cpu" or config.training.precision not in ("bf16_mixed", "bf16_pure"):
        return
    for kind in facts.inventory.kinds:
        peaks = kind.gpu.peak_tflops
        if peaks.bf16 is None and peaks.fp16 is not None:
            yield Problem(
                "training.precision",
                f"{config.training.precision} needs BF16 matrix products, and {kind.gpu.name} has none.",
                "Use training.precision=fp16_mixed or fp32, or GPUs with BF16 (A100 and later).",
            )
            return


def fp16_needs_a_gpu(facts: Facts) -> Iterator[Problem]:
    """FP16 exists for tensor cores; a CPU computes it slowly or not at all, and BF16 or FP32 is always the
    better choice."""
    config = facts.config
    if config.cluster.device == "cpu" and config.training.precision == "fp16_mixed":
        yield Problem(
            "training.precision",
            "fp16_mixed on a CPU has no fast FP16 matrix products to gain from.",
            "Use training.precision=fp32 or bf16_mixed on a CPU.",
        )


def compile_needs_whole_backward(facts: Facts) -> Iterator[Problem]:
    """A compiled block has one backward graph, which zero-bubble schedules would have to take apart."""
    config = facts.config
    if config.training.compile and config.parallel.pipeline > 1 and config.parallel.schedule in SPLIT_BACKWARDS:
        yield Problem(
            "training.compile",
            f"parallel.schedule={config.parallel.schedule} splits the backward pass into inputs and weights, "
            "which compiled blocks do not allow.",
            "Use training.compile=false, or parallel.schedule=1f1b or interleaved_1f1b.",
        )


def recompute_needs_whole_backward(facts: Facts) -> Iterator[Problem]:
    """What a block computes again for the gradients of its inputs is needed again for those of its weights.

    torch refuses that for `selective`, and with `full` keeps it, which takes more memory than no recomputation (fake
    tensors: LLaMA-7B's width, 16 blocks, pipeline 2: 36.1 GiB against 30.0)."""
    config, recompute = facts.config, facts.config.training.activation_checkpointing
    if recompute != "none" and config.parallel.pipeline > 1 and config.parallel.schedule in SPLIT_BACKWARDS:
        yield Problem(
            "training.activation_checkpointing",
            f"parallel.schedule={config.parallel.schedule} splits the backward pass into inputs and weights: "
            f"what {recompute} computes again for the first has to be kept for the second, and saves no memory.",
            "Use training.activation_checkpointing=none, or parallel.schedule=1f1b or interleaved_1f1b.",
        )


def momentum_belongs_to_sgd(facts: Facts) -> Iterator[Problem]:
    """AdamW has its own moments; a momentum beside them would be ignored."""
    optimizer = facts.config.optimizer
    if optimizer.name == "adamw" and optimizer.momentum > 0:
        yield Problem(
            "optimizer.momentum",
            f"momentum={optimizer.momentum:g} is for optimizer.name=sgd; adamw has optimizer.betas.",
            "Remove it, or choose optimizer.name=sgd.",
        )


RULES = (
    gpu_has_the_precision,
    fp16_needs_a_gpu,
    compile_needs_whole_backward,
    recompute_needs_whole_backward,
    momentum_belongs_to_sgd,
)
