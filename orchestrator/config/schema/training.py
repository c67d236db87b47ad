"""`training.*` and `optimizer.*`: what is learned and how."""

from __future__ import annotations

from typing import Literal

from orchestrator.config.schema.base import Count, CountOrZero, Fraction, Positive, PositiveOrZero, Section

Precision = Literal["fp32", "bf16_mixed", "bf16_pure", "fp16_mixed"]


class TrainingConfig(Section):
    """The training loop."""

    sequence_length: Count
    """Tokens of one training sequence."""
    global_batch_size: Count
    """Sequences of one optimizer step, over all GPUs."""
    micro_batch_size: Count = 1
    """Sequences that one rank computes at a time; the number of accumulation steps follows."""
    steps: Count | None = None
    """Optimizer steps; null: as many as `tokens` needs. Given on the command line, it replaces a file's `tokens`."""
    tokens: Count | None = None
    """Tokens to train on, rounded up to whole steps; null: `steps` decides. Given on the command line, it replaces
    a file's `steps`."""
    precision: Precision = "bf16_mixed"
    """`fp32`; `bf16_mixed`: BF16 compute, FP32 master weights and reduction; `bf16_pure`: all 2 bytes; `fp16_mixed`:
    with loss scaling."""
    gradient_clip: Positive | None = 1.0
    """Largest norm of the whole gradient; null: not clipped."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is recomputed in the backward pass instead of kept: nothing, the cheap parts of a block, or whole blocks."""
    compile: bool = False
    """Whether transformer blocks go through torch.compile."""
    seed: CountOrZero = 0
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = True
    """Whether only deterministic kernels may run, so that a run can be repeated bit for bit."""
    validate_every_steps: CountOrZero = 0
    """Steps between validations; 0: only after the last step."""
    validation_sequences: Count = 256
    """Validation sequences that one validation reads (all, if there are fewer)."""
    profile_steps: tuple[Count, Count] | None = None
    """First and last step of a profiler window, as `[10,12]`: its trace goes into the run's `profile/`; null: none."""
    profile_ranks: tuple[CountOrZero, ...] | Literal["all"] = (0,)
    """Ranks that write a trace of `profile_steps`, as `[0,7]`; `all`: every rank, where there are at most 16."""


class ScheduleConfig(Section):
    """Learning rate over the steps."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Steps over which the rate rises linearly from 0 to `lr`."""
    decay_steps: Count | None = None
    """Step at which the rate has reached its minimum; null: the last step."""
    minimum_ratio: Fraction = 0.1
    """Smallest rate as a share of `lr` (0 to 1)."""


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`adamw` (decoupled weight decay) or plain `sgd`."""
    lr: Positive = 3e-4
    """Highest learning rate (no unit)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments (0 to 1)."""
    eps: Positive = 1e-8
    """Added to AdamW's denominator (no unit)."""
    weight_decay: PositiveOrZero = 0.1
    """Weight decay a unit of learning rate; norms, biases and embeddings' vectors of one dimension are left out."""
    momentum: Fraction = 0.0
    """Momentum of `sgd` (0 to 1)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the steps."""
