"""Which of the tensors that a rank holds is what: weights, their copies, gradients, optimizer state, buffers.

The one place that knows where FSDP2 keeps its copies and buffers (private parts of torch 2.13; a test of each). Next:
`account.py`, which adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from orchestrator.engine.data_parallel import DataParallel
from orchestrator.engine.gradients import local
from orchestrator.engine.step import Parts

Category = Literal["parameters", "gathered", "gradients", "optimizer", "buffers", "logits", "activations"]
"""`gathered`: whole or cast copies of weights; `buffers`: what collectives work in, gradients of the unit at work
before they are reduced, tables; `logits`: as wide as the vocabulary; `activations`: what is none of these."""

ALONE = "alone"
"""Axis of a group of one rank: nothing is sent over it."""

CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]


def kept(parts: Parts) -> Iterator[tuple[Category, Tensor]]:
    """Model states: this rank's weights, reduced gradients and optimizer state (local parts)."""
    for parameter in parts.parameters.values():
        yield "parameters", local(parameter)
        if parameter.grad is not None:
            yield "gradients", local(parameter.grad)
        for value in parts.optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                yield "optimizer", local(value)


def known(parts: Parts) -> Iterator[tuple[Category, Tensor]]:
    """Every tensor that can be told by who holds it, with what it is (local parts)."""
    yield from kept(parts)
    for stage in parts.stages:
        for buffer in stage.buffers():
            yield "buffers", buffer
    for data_parallel in parts.data_parallel:
        yield from _of_units(data_parallel)


def _of_units(data_parallel: DataParallel) -> Iterator[tuple[Category, Tensor]]:
    """Copies of weights and whole gradients that FSDP's units hold now."""
    for module in data_parallel.modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if isinstance(partial := group._partial_reduce_output, Tensor):
                yield "gradients", partial
            for held in group.fsdp_params:
                for gathered in getattr(held, "all_gather_outputs", ()):
                    yield "gathered", gathered
                accumulated = getattr(held, "unsharded_accumulated_grad", None)
                if accumulated is not None:
                    yield "gradients", local(accumulated)
                raw = getattr(getattr(held, "_unsharded_param", None), "grad", None)
                if raw is not None:
                    # Where nothing is cast, whole gradients are added up where the backward pass leaves them.
                    adds_up = held.reduce_dtype is None and data_parallel.zero_stage <= 1
                    yield "gradients" if adds_up else "buffers", local(raw)


def resizing() -> tuple[tuple[Any, str], ...]:
    """Functions of torch that change the size of a storage without an operation: (module, name)."""
    return (_fsdp_param, "alloc_storage"), (_fsdp_param, "free_storage"), (_fsdp_param_group, "alloc_storage")


def allocating() -> tuple[tuple[Any, Category], ...]:
    """Classes of torch whose `allocate` makes the tensors that a collective works in, and what those are."""
    return (DefaultAllGather, "gathered"), (DefaultReduceScatter, "buffers")


def vocabulary_sizes(parts: Parts) -> frozenset[int]:
    """Widths of logits on this rank: the whole vocabulary, and its part under tensor parallelism."""
    sizes: set[int] = set()
    for stage in parts.stages:
        head = getattr(stage, "head", None)
        if head is not None:
            sizes |= {head.weight.shape[0], local(head.weight).shape[0]}
            if isinstance(head.weight, DTensor):
                sizes.add(-(-head.weight.shape[0] // parts.mesh.tensor.size()))
    return frozenset(sizes)


def axes_of(parts: Parts) -> dict[str, str]:
    """Name of each axis of the mesh by its group's name; a group of all ranks goes by the axis that it is, one of a
    single rank by `ALONE`."""
    mesh = parts.mesh
    named = [("pipeline", mesh.whole["pipeline"]), ("tensor", mesh.tensor), ("data", mesh.gradient)]
    if parts.data_parallel[0].zero_stage > 0:
        copy = (mesh.sharding.mesh_dim_names or ())[-1]
        named.append(("data", mesh.sharding[copy] if mesh.sharding.ndim == 2 else mesh.sharding))
        named.append(("replicas", mesh.whole["replicate"]))
    found = {str(axis.get_group().group_name): name if axis.size() > 1 else ALONE for name, axis in named}
    if parts.tied is not None and parts.tied.group is not None:
        found[str(parts.tied.group.group_name)] = "tied"
    if dist.group.WORLD is not None:
        found.setdefault(str(dist.group.WORLD.group_name), "all")
    return found
