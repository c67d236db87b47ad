"""Counts what a piece of training really does: bytes by category at the peak, collectives by axis, FLOPs.

`account(parts)` watches every operation of a block of code, on real tensors and on those without numbers. A byte counts
once however many tensors view it. Imports nothing of `plan/`: the planner is held against these counts, never
the other way round. Which tensor is what: `holdings.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from orchestrator.engine.gradients import local
from orchestrator.engine.holdings import (
    ALONE,
    CATEGORIES,
    Category,
    allocating,
    axes_of,
    kept,
    known,
    resizing,
    vocabulary_sizes,
)
from orchestrator.engine.step import Parts

_KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""Name of a collective by torch's operation."""
_INPUT_SECOND = frozenset({"_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allgather_"})
"""Operations whose second argument is what the rank hands in; elsewhere it is the first."""
_COUNTED = {
    *flop_registry,
    torch.ops.aten.addmm_,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
"""Operations whose floating-point operations are counted."""


@dataclass(slots=True)
class Calls:
    """Collectives of one kind on one axis."""

    calls: int = 0
    input_bytes: int = 0
    """What this rank handed in, summed over the calls."""


@dataclass(slots=True)
class Account:
    """What was counted."""

    start: dict[Category, int] = field(default_factory=dict)
    """Bytes held when the block began."""
    peak: dict[Category, int] = field(default_factory=dict)
    """Bytes held at the instant at which most were held."""
    end: dict[Category, int] = field(default_factory=dict)
    """Bytes held when the block ended."""
    host_bytes: int = 0
    """States in host memory at the peak, which are in none of the above (offload)."""
    collectives: dict[tuple[str, str], Calls] = field(default_factory=dict)
    """By axis (`data`, `replicas`, `tensor`, `pipeline`, `tied`, `all`, or a group's name) and kind (`all_reduce`
    …)."""
    flops: int = 0
    """Floating-point operations of matrix products and attention, recomputed ones included, nothing halved for the
    causal mask."""

    @property
    def peak_bytes(self) -> int:
        """All categories at the peak."""
        return sum(self.peak.values())


@contextmanager
def account(parts: Parts) -> Iterator[Account]:
    """Count what the block does with this rank's `parts`. Slows it down many times; counts are complete on return."""
    watch = Watch(parts)
    with watch:
        found = watch.begin()
        yield found
        watch.finish()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows all tensors that the code inside of it makes, from its entry on; `begin` and `finish` bound an account.

    Of parts on the meta device, tensors of that device count, else only real ones: torch works out shapes with tensors
    of its own. `states_on_host`: weights, optimizer state and reduced gradients are in host memory and no part of the
    device's bytes.
    """

    def __init__(self, parts: Parts, *, states_on_host: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states_on_host = states_on_host
        self._host: set[int] = set()
        self.found = Account()
        self._parts = parts
        self._without_numbers = parts.device.type == "meta"
        self._axes = axes_of(parts)
        self._vocabulary = vocabulary_sizes(parts)
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._stamps: dict[int, Category] = {}
        self._total = self._largest = 0
        self._new_peak = False
        self._dead: list[tuple[Category, int]] = []
        self._entered = ExitStack()

    def __enter__(self) -> Watch:
        self._leave_out_host()
        for _, tensor in known(self._parts):
            self._track(tensor)
        for module, name in resizing():
            self._entered.enter_context(patch.object(module, name, partial(self._resized, getattr(module, name))))
        for collective, category in allocating():
            self._entered.enter_context(patch.object(collective, "allocate", self._stamping(collective, category)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.close()

    def begin(self) -> Account:
        """Start a new account here."""
        self._leave_out_host()
        self.found = Account(start=self.by_category())
        self._largest, self._new_peak, self._dead = self._total, False, []
        self.found.peak = dict(self.found.start)
        return self.found

    def finish(self) -> Account:
        """Complete the account."""
        self._settle()
        self.found.end = self.by_category()
        return self.found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._dead:
            self._settle()
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        elif self._ours(result):
            self.found.flops += _flops(func, args, kwargs or {}, result)
        worked_in = self._makes_buffer(func, args)
        to_host = self._states_on_host and (kwargs or {}).get("device") == torch.device("cpu")
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and self._ours(value):
                if to_host:
                    self._host.add(value.untyped_storage()._cdata)
                self._track(value)
                if worked_in:
                    self._stamps.setdefault(local(value).untyped_storage()._cdata, "buffers")
        self._note_peak()
        return result

    def _makes_buffer(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operation gives a weight's gradient, of which nobody can tell yet until autograd hands it over, or
        what a reduction's buffer is divided into."""
        if func.overloadpacket is torch.ops.aten.mm:
            # Autograd alone transposes the first factor: the gradient of the product's result.
            return not args[0].is_contiguous()
        if func is torch.ops.aten.div.Tensor and isinstance(args[0], Tensor):
            return self._stamps.get(local(args[0]).untyped_storage()._cdata) == "buffers"
        return False

    def _note_peak(self) -> None:
        if self._total > self._largest:
            self._largest, self._new_peak = self._total, True
            self._dead = []

    def by_category(self) -> dict[Category, int]:
        """Bytes of all live storages by what they are now."""
        sizes: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        counted: set[int] = set()
        for category, tensor in known(self._parts):
            self._track(tensor)
            key = tensor.untyped_storage()._cdata
            if key not in counted:
                counted.add(key)
                sizes[category] += self._live[key][1]
        # A copy: the garbage collector, or a collective that ends on a thread of its own, lets tensors die meanwhile.
        for key, (_, size) in self._live.copy().items():
            if key not in counted:
                sizes[self._stamps.get(key, "activations")] += size
        return sizes

    def _leave_out_host(self) -> None:
        """Take what lives in host memory out of the device's bytes."""
        if self._states_on_host:
            for _, tensor in kept(self._parts):
                self._host.add(tensor.untyped_storage()._cdata)
                self._track(tensor)

    def _ours(self, value: Any) -> bool:
        first = value[0] if isinstance(value, tuple | list) and value else value
        if not isinstance(first, Tensor) or isinstance(first, FakeTensor):
            return False
        return first.is_meta == self._without_numbers

    def _track(self, tensor: Tensor) -> None:
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = 0 if key in self._host else storage.nbytes()
        if key in self._live:
            # FSDP frees and fills the same storage again by resizing it.
            reference, before = self._live[key]
            if size != before:
                self._total += size - before
                self._live[key] = (reference, size)
            return
        self._total += size
        self._live[key] = (weakref.ref(storage, partial(self._forget, key)), size)
        if tensor.dim() > 1 and not self._vocabulary.isdisjoint((tensor.shape[0], tensor.shape[-1])):
            self._stamps[key] = "logits"

    def _forget(self, key: int, _: object) -> None:
        # Called while a tensor dies: nothing may look at tensors here.
        entry = self._live.pop(key, None)
        stamp = self._stamps.pop(key, "activations")
        self._host.discard(key)
        if entry is not None:
            self._total -= entry[1]
            if self._new_peak and entry[1]:
                self._dead.append((stamp, entry[1]))

    def _resized(self, resize: Callable[[Tensor], None], tensor: Tensor) -> None:
        if self._ours(tensor):
            self._settle()
        resize(tensor)
        if self._ours(tensor):
            self._track(tensor)
            self._note_peak()

    def _stamping(self, collective: Any, category: Category) -> Callable[..., Tensor]:
        plain = collective.allocate

        def allocate(own: Any, *args: Any, **options: Any) -> Tensor:
            made: Tensor = plain(own, *args, **options)
            self._stamps[made.untyped_storage()._cdata] = category
            return made

        return allocate

    def _settle(self) -> None:
        """Count the categories of the last peak: once bytes have been given back after it, not at each operation that
        adds some. What has died since was none of the tensors that are told by who holds them."""
        if not self._new_peak:
            return
        dead = self._dead.copy()  # before the look at what lives: what dies during it is counted there
        peak = self.by_category()
        for category, size in dead:
            peak[category] += size
        self._new_peak, self._dead = False, []
        self.found.peak = peak
        if self._states_on_host:
            self.found.host_bytes = sum(tensor.untyped_storage().nbytes() for _, tensor in kept(self._parts))

    def _count(self, operation: str, args: tuple[Any, ...]) -> None:
        kind = _KINDS.get(operation)
        if kind is None:
            return
        tensors = [tensor for tensor in tree_leaves(args[:2]) if isinstance(tensor, Tensor)]
        for tensor in tensors:
            self._track(tensor)
            if operation == "recv_":
                self._stamps.setdefault(local(tensor).untyped_storage()._cdata, "buffers")
        handed_in = args[1] if operation in _INPUT_SECOND else args[0]
        size = sum(tensor.nbytes for tensor in tree_leaves(handed_in) if isinstance(tensor, Tensor))
        name = _group_name(args)
        axis = self._axes.get(name, name)
        if axis == ALONE:
            return
        calls = self.found.collectives.setdefault((axis, kind), Calls())
        calls.calls += 1
        calls.input_bytes += size


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a matrix product or of attention on this rank's parts; 0 for everything else."""
    packet = func.overloadpacket
    if packet not in _COUNTED:
        return 0
    args, kwargs, result = tree_map_only(DTensor, local, (args, kwargs, result))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]
    counted = flop_registry[torch.ops.aten.addmm if packet is torch.ops.aten.addmm_ else packet]
    return int(counted(*args, **kwargs, out_val=result))


def _group_name(args: tuple[Any, ...]) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return str(dist.ProcessGroup.unbox(value).group_name)
    # Functional collectives name the group in their last text argument.
    return next(value for value in reversed(args) if isinstance(value, str))
