"""Counts what a piece of training really does: bytes by category at the instant of the peak, collectives by axis.

`account(parts)` watches every operation of a block of code, on real and on fake tensors alike. A byte counts once
however many tensors view it. Imports nothing of `plan/`: the planner is held against these counts, never the other way
round.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.engine.gradients import local
from orchestrator.engine.step import Parts

Category = Literal["parameters", "gathered", "gradients", "optimizer", "buffers", "activations"]
"""`gathered`: whole or cast copies of weights; `activations`: everything that is none of the others."""

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
    collectives: dict[tuple[str, str], Calls] = field(default_factory=dict)
    """By axis (`data`, `replicas`, `tensor`, `pipeline`, `tied`, `all`, or a group's name) and kind (`all_reduce`
    …)."""

    @property
    def peak_bytes(self) -> int:
        """All categories at the peak."""
        return sum(self.peak.values())


@contextmanager
def account(parts: Parts) -> Iterator[Account]:
    """Count what the block does with this rank's `parts`. Slows it down many times; counts are complete on return."""
    watch = _Watch(parts)
    watch.found.start = watch.by_category()
    watch.found.peak = dict(watch.found.start)
    watch.largest = sum(watch.found.start.values())
    with watch:
        yield watch.found
    watch.found.end = watch.by_category()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, parts: Parts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Account()
        self.largest = 0
        self._parts = parts
        self._axes = _axes(parts)
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._total = 0
        for _, tensor in _known(parts):
            self._track(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._track(value)
        if self._total > self.largest:
            self.largest = self._total
            self.found.peak = self.by_category()
        return result

    def by_category(self) -> dict[Category, int]:
        """Bytes of all live storages by what they are now."""
        sizes: dict[Category, int] = dict.fromkeys(Category.__args__, 0)  # type: ignore[attr-defined]
        counted: set[int] = set()
        for category, tensor in _known(self._parts):
            self._track(tensor)
            key = tensor.untyped_storage()._cdata
            if key not in counted:
                counted.add(key)
                sizes[category] += tensor.untyped_storage().nbytes()
        sizes["activations"] = sum(self._size(key) for key in list(self._live) if key not in counted)
        return sizes

    def _track(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            # FSDP frees and fills the same storage again by resizing it.
            reference, before = self._live[key]
            self._total += size - before
            self._live[key] = (reference, size)
            return
        self._total += size
        self._live[key] = (weakref.ref(storage, partial(self._forget, key)), size)

    def _forget(self, key: int, _: object) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self._total -= entry[1]

    def _size(self, key: int) -> int:
        storage = self._live[key][0]()
        return 0 if storage is None else int(storage.nbytes())

    def _count(self, operation: str, args: tuple[Any, ...]) -> None:
        kind = _KINDS.get(operation)
        if kind is None:
            return
        handed_in = args[1] if operation in _INPUT_SECOND else args[0]
        size = sum(tensor.nbytes for tensor in tree_leaves(handed_in) if isinstance(tensor, Tensor))
        name = _group_name(args)
        calls = self.found.collectives.setdefault((self._axes.get(name, name), kind), Calls())
        calls.calls += 1
        calls.input_bytes += size


def _group_name(args: tuple[Any, ...]) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return str(dist.ProcessGroup.unbox(value).group_name)
    # Functional collectives name the group in their last text argument.
    return next(value for value in reversed(args) if isinstance(value, str))


def _axes(parts: Parts) -> dict[str, str]:
    """Name of each axis of the mesh by its group's name; a group of all ranks goes by the axis that it is."""
    mesh = parts.mesh
    named = [("pipeline", mesh.whole["pipeline"]), ("tensor", mesh.tensor), ("data", mesh.gradient)]
    if parts.data_parallel[0].zero_stage > 0:
        copy = (mesh.sharding.mesh_dim_names or ())[-1]
        named.append(("data", mesh.sharding[copy] if mesh.sharding.ndim == 2 else mesh.sharding))
        named.append(("replicas", mesh.whole["replicate"]))
    found = {str(axis.get_group().group_name): name for name, axis in named if axis.size() > 1}
    if parts.tied is not None and parts.tied.group is not None:
        found[str(parts.tied.group.group_name)] = "tied"
    if dist.group.WORLD is not None:
        found.setdefault(str(dist.group.WORLD.group_name), "all")
    return found


def _known(parts: Parts) -> Iterator[tuple[Category, Tensor]]:
    """Every tensor that is no activation, with what it is (local parts)."""
    for parameter in parts.parameters.values():
        yield "parameters", local(parameter)
        if parameter.grad is not None:
            yield "gradients", local(parameter.grad)
        for value in parts.optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                yield "optimizer", local(value)
    for stage in parts.stages:
        for buffer in stage.buffers():
            yield "buffers", buffer
    for data_parallel in parts.data_parallel:
        yield from _of_units(data_parallel.modules)


def _of_units(modules: tuple[Any, ...]) -> Iterator[tuple[Category, Tensor]]:
    """Copies of weights and whole gradients that FSDP's units hold now."""
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for held in group.fsdp_params:
                for gathered in getattr(held, "all_gather_outputs", ()):
                    yield "gathered", gathered
                whole = getattr(held, "_unsharded_param", None)
                for gradient in (getattr(whole, "grad", None), getattr(held, "unsharded_accumulated_grad", None)):
                    if gradient is not None:
                        yield "gradients", gradient._local_tensor if isinstance(gradient, DTensor) else gradient
