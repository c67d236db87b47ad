"""Activation checkpointing: what a block does not keep for its backward pass but computes again.

`full` keeps a block's input alone; `selective` keeps what is dear to compute, the results of matrix products and of
attention, and computes the rest again (norms, rotary, activation functions). Of a product whose result is a part of a
sum over tensor ranks it keeps the sum, which is cut over them, so that neither is computed or sent again. The block's
own forward is wrapped, not the module, so that parameter names stay what they are. The gradients are the same bits as
without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

Recompute = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default})
_SUMS = frozenset(
    {torch.ops._c10d_functional.reduce_scatter_tensor.default, torch.ops._c10d_functional.all_reduce.default}
)
KEPT = (
    _PRODUCTS
    | {
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    }
    | _SUMS
)
"""Operations whose results `selective` keeps."""


def apply_recompute(blocks: list[nn.Module], recompute: Recompute, *, dropout: bool) -> None:
    """Wrap the forward of every block, in place. `dropout`: whether masks must be drawn alike the second time."""
    if recompute == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if recompute == "selective":
        options["context_fn"] = _contexts
    for block in blocks:
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[Any, Any]:
    """What the forward and the recomputation of one block run in, as `create_selective_checkpoint_contexts` makes."""
    _, replay = torch_checkpoint.create_selective_checkpoint_contexts(_keep_products)  # type: ignore[no-untyped-call]
    return _Keeping(_keep_products, replay.storage), replay


class _Keeping(torch_checkpoint._CachingTorchDispatchMode):
    """torch's recorder of kept results, without those that no backward pass asks for."""

    def __init__(self, policy: Any, storage: Any) -> None:
        super().__init__(policy, storage)  # type: ignore[no-untyped-call]
        self._last: list[tuple[Any, int]] = []
        """Where the results since the last product are stored: that product's own, and its sum over ranks."""
        self._result: Any = None
        """The last of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func not in KEPT or torch.compiler.is_compiling():
            return result
        key = torch_checkpoint._sac_storage_key(func, args)  # type: ignore[no-untyped-call]
        if func in _PRODUCTS:
            self._last = []
        elif func in _SUMS and self._last:
            # The product before is one part of this sum. The recomputation hands it on and reads only the sum.
            product, number = self._last[-1]
            self.storage[product][number] = _PartOfSum(self._result)
        self._last.append((key, self.func_counter[key] - 1))
        self._result = result
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._result = None
        # A block ends with a product whose result its backward pass does not need: computed again if it is, after all.
        for key, index in self._last:
            self.storage[key][index] = torch_checkpoint._RECOMPUTE


class _PartOfSum:
    """In place of a result whose sum over tensor ranks is kept: its shape, without memory behind it."""

    def __init__(self, result: Tensor) -> None:
        self._layout = result.shape, result.stride()
        self._options: dict[str, Any] = {"dtype": result.dtype, "device": result.device}

    def get_val(self, _: bool) -> Tensor:
        """What the recomputation gets instead."""
        return torch.empty_strided(*self._layout, **self._options)
