"""`Work`: what one GPU of a plan has to do in a step, as plain values: the common input of memory, traffic and time.

A configuration becomes a `Work` here; the accuracy report makes one from a published table's row. Everything behind it
(`activations.py`, `compute.py`, `traffic.py`, `memory.py`, `cost.py`) is the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.config.schema import RunConfig
from orchestrator.plan.architecture import Architecture, architecture_of
from orchestrator.plan.run_plan import ParallelFacts

Recompute = Literal["none", "attention", "cheap", "operators", "layers", "full"]
"""What the backward pass computes again: nothing; stored attention scores; everything but products and attention; that
and every second product; every second block; every block."""

SELECTIVE: Recompute = "cheap"
"""What `training.activation_checkpointing=selective` means in the engine."""


@dataclass(frozen=True, slots=True)
class Work:
    """Model, batch and split of a step."""

    architecture: Architecture
    parallel: ParallelFacts
    sequence_length: int
    micro_batch_size: int
    precision: str
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    offload: bool = False
    moments_share: float = 1.0
    """Optimizer state relative to Adam's two moments."""
    attended: int | None = None
    """Tokens that a token can see at most (sliding window); None: the sequence."""
    on_gpu: bool = True
    """Whether kernels of a GPU run, some of which save less than those of a CPU."""
    gpus_on_host: int = 8
    """GPUs that share one host."""

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch_size * self.sequence_length // self.parallel.context

    @property
    def seen(self) -> int:
        """Tokens that attention looks at."""
        return min(self.sequence_length, self.attended or self.sequence_length)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.micro_batch_size * self.sequence_length * self.parallel.micro_batches * self.parallel.data


def moments_share(config: RunConfig) -> float:
    """Optimizer state relative to Adam's two moments: SGD keeps one with momentum and none without."""
    if config.optimizer.name == "adamw":
        return 1.0
    return 0.5 if config.optimizer.momentum > 0 else 0.0


def work_of(config: RunConfig, parallel: ParallelFacts) -> Work:
    """The work of a configuration under its decided degrees."""
    recompute: dict[str, Recompute] = {"none": "none", "selective": SELECTIVE, "full": "full"}
    return Work(
        architecture=architecture_of(config.model),
        parallel=parallel,
        sequence_length=config.training.sequence_length,
        micro_batch_size=config.training.micro_batch_size,
        precision=config.training.precision,
        recompute=recompute[config.training.activation_checkpointing],
        sequence_parallel=config.parallel.sequence_parallel and parallel.tensor > 1,
        offload=config.parallel.offload == "all",
        moments_share=moments_share(config),
        attended=config.model.sliding_window,
        on_gpu=config.cluster.device == "cuda",
        gpus_on_host=config.cluster.gpus_per_node,
    )
