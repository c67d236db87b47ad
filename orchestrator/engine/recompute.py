"""Activation checkpointing: what a block does not keep for its backward pass but computes again.

`full` keeps a block's input alone; `selective` keeps what is dear to compute, the results of matrix products and of
attention, and computes the rest again (norms, rotary, activation functions). The block's own forward is wrapped, not
the module, so that parameter names stay what they are. The gradients are the same bits as without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operations whose results `selective` keeps."""


def apply_recompute(blocks: list[nn.Module], recompute: Recompute, *, dropout: bool) -> None:
    """Wrap the forward of every block, in place. `dropout`: whether masks must be drawn alike the second time."""
    if recompute == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    for block in blocks:
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
