"""What each `training.precision` means in tensors: types of master weights, of compute, of gradient reduction.

Refuses a precision that this engine does not run yet with the list of those it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from orchestrator.config.schema import Precision

MASTER: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16_mixed": torch.float32,
    "bf16_pure": torch.bfloat16,
    "fp16_mixed": torch.float32,
}
"""Type in which weights are kept and updated, by precision."""
MIXED: dict[str, torch.dtype] = {"bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}
"""Type of the copies of weights that are computed with, where it is another."""


def master_dtype(precision: Precision) -> torch.dtype:
    """Type in which weights, and with them gradients and optimizer state, are kept. Raises ValueError if not
    supported."""
    if precision not in MASTER:
        raise ValueError(f"training.precision={precision} is not one that the engine runs: {', '.join(MASTER)}")
    return MASTER[precision]


def compute_dtype(precision: Precision) -> torch.dtype:
    """Type of activations. Raises as `master_dtype`."""
    return MIXED.get(precision, master_dtype(precision))


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """What data parallelism casts: copies of 2 bytes of FP32 weights for compute, FP32 gradient sums.

    Raises as `master_dtype`.
    """
    master_dtype(precision)
    if precision in MIXED:
        return MixedPrecisionPolicy(param_dtype=MIXED[precision], reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


@contextmanager
def doubled() -> Iterator[None]:
    """Inside, `fp32` means FP64: for comparisons, in which differences of order vanish and mistakes do not."""
    kept = MASTER["fp32"]
    MASTER["fp32"] = torch.float64
    try:
        yield
    finally:
        MASTER["fp32"] = kept
