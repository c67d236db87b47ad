"""Which kernel of scaled dot-product attention ran: read off what it left for the backward pass, not predicted.

torch chooses by device, type, shapes, mask and dropout. The first training forward pass of each attention core is
looked at once; inside of compiled blocks, where there is nothing to look at, the operations of one later step are
recorded instead. Costs nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from models.parameters import ShardingTable

KERNELS = {
    "ScaledDotProductFlashAttentionForCpuBackward": "flash_cpu",
    "ScaledDotProductFlashAttentionBackward": "flash",
    "ScaledDotProductEfficientAttentionBackward": "efficient",
    "ScaledDotProductCudnnAttentionBackward": "cudnn",
    "ScaledDotProductFusedAttentionOverrideableBackward": "overridable",
}
"""Name of a kernel by what stands for it in the graph of a backward pass. Without any, products and a softmax were
computed one by one: `math`."""
OPERATIONS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overridable",
}
_MOST_HOPS = 6
"""Changes of view between an attention core's result and the kernel's."""


class AttentionWatch:
    """What has been seen of one rank's attention cores."""

    def __init__(self, cores: Iterable[nn.Module], *, compiled: bool) -> None:
        """`cores`: what computes attention and nothing else; `compiled`: whether that happens in compiled code."""
        self._seen: set[str] = set()
        self._compiled = compiled
        self._told = False
        for core in () if compiled else cores:
            self._watch(core)

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that ran, several joined with commas; None: none has been seen yet."""
        return ", ".join(sorted(self._seen)) or None

    def tell(self) -> None:
        """Say it once in this rank's log, as soon as it is known."""
        if self._seen and not self._told:
            print(f"attention ran in torch's kernel: {self.kernel}", flush=True)
            self._told = True

    def _watch(self, core: nn.Module) -> None:
        def look(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.grad_fn is not None:
                self._seen.add(kernel_of(output))
                handle.remove()

        handle = core.register_forward_hook(look)

    @contextmanager
    def observing(self, *, steady: bool) -> Iterator[None]:
        """Around a step. `steady`: it is an ordinary one, which compiles nothing and which nothing else records."""
        if not self._compiled or self._seen or not steady:
            yield
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            yield
        ran = {event.name for event in recorded.events() or ()}
        self._seen |= {name for operation, name in OPERATIONS.items() if operation in ran} or {"math"}


def kernel_of(output: Tensor) -> str:
    """The kernel whose result `output` is, or a view of it; it must require a gradient."""
    node: Any = output.grad_fn
    for _ in range(_MOST_HOPS):
        if node is None:
            break
        name = type(node).__name__.rstrip("0123456789")
        if name in KERNELS:
            return KERNELS[name]
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return "math"


def watch_attention(stages: Sequence[nn.Module], table: ShardingTable, *, compiled: bool) -> AttentionWatch:
    """Watch the attention cores of this rank's stages: the modules of style `head_dropout`."""
    patterns = [pattern for pattern, style in table.styles if style == "head_dropout"]
    cores = [
        module
        for stage in stages
        for name, module in stage.named_modules()
        if any(pattern.count(".") == name.count(".") and fnmatchcase(name, pattern) for pattern in patterns)
    ]
    return AttentionWatch(cores, compiled=compiled)
