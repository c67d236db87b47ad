"""Bytes of all tensors that exist at once while code runs, on real or fake tensors: the peak, counted by storage.

Storages are followed by weak references and sized anew at every operation, because FSDP frees and refills them in
place. A storage that no operation has returned is not seen; register those that exist before with `add`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorTracker(TorchDispatchMode):
    """Use as a context; `peak_bytes` afterwards."""

    def __init__(self, fake_mode: Any = None) -> None:
        """`fake_mode`: count fake tensors of this mode only, not those with which torch works out shapes."""
        super().__init__()
        self.peak_bytes = 0
        self._fake_mode = fake_mode
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Follow the storages of these tensors, whatever else is in between left out."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if self._fake_mode is not None and getattr(local, "fake_mode", None) is not self._fake_mode:
                continue
            storage = local.untyped_storage()
            key = id(storage)
            if key not in self._live:
                self._live[key] = weakref.ref(storage, lambda _, key=key: self._live.pop(key, None))  # type: ignore[misc]

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        storages = [reference() for reference in list(self._live.values())]
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in storages if storage is not None))
        return result
