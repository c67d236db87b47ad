"""What gloo ranks do in the tests of Hugging Face weights: build a plan, load a folder into it, give logits back.

A stage's output goes to the next one by plain send and receive, so that the logits hang on nothing but the modules and
their weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.spec import parameter_specs
from orchestrator.checkpoint.manifest import describe
from orchestrator.checkpoint.write import save
from orchestrator.engine.build import build
from orchestrator.engine.mesh import Mesh, build_mesh
from orchestrator.engine.start_weights import load_huggingface
from orchestrator.engine.state import after_loading, saved_parameters, state_of
from orchestrator.engine.step import Parts
from orchestrator.plan.run_plan import RunPlan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What ranks load, and what they do with it."""

    plan: RunPlan
    folder: Path
    tokens: Tensor
    gather: bool = True
    """Whether to hand back whole parameters."""
    checkpoints: Path | None = None
    """Where to save a checkpoint of it; None: nowhere."""


@dataclass(frozen=True)
class Loaded:
    """What one rank has after loading."""

    logits: Tensor | None
    """[b, s, v]; only ranks with the head have them."""
    parameters: dict[str, Tensor]
    """Whole parameters of this rank's stages, gathered; empty where they were not asked for."""
    growth_bytes: int
    """By how much the process grew, at most, while it loaded."""


def loaded_under(rank: int, world: int, cases: list[Case]) -> list[Loaded]:
    """Every case in turn (collective)."""
    torch.set_num_threads(1)
    meshes: dict[tuple[int, ...], Mesh] = {}  # making one means making many groups
    results = []
    for case in cases:
        parallel = case.plan.parallel
        assert parallel is not None
        key = (parallel.pipeline, parallel.replicate, parallel.zero_group, parallel.context, parallel.tensor)
        if key not in meshes:
            meshes[key] = build_mesh(parallel, "cpu")
        results.append(_loaded(rank, world, case, meshes[key]))
    return results


def _loaded(rank: int, world: int, case: Case, mesh: Mesh) -> Loaded:
    plan = case.plan
    parts = build(plan, mesh, CPU)
    grown = peak_growth()
    load_huggingface(case.folder, parts, plan.config.model)
    growth_bytes = grown()
    after_loading(parts)
    if case.checkpoints is not None:
        facts = describe(plan, step=3, tokens=7, data_fingerprint="", data_position={})
        save(case.checkpoints, 3, state_of(parts), facts)
    rows = {spec.name: spec.shape[0] for spec in parameter_specs(plan.config.model)}
    held = saved_parameters(parts) if case.gather else {}
    # A padded vocabulary has rows beyond the model's own, at the end.
    whole = {name: _whole(parameter)[: rows[name]] for name, parameter in held.items()}
    return Loaded(_logits(parts, plan, rank, world, case.tokens), whole, growth_bytes)


def peak_growth() -> Callable[[], int]:
    """Forget the peak of this process's memory; the function gives by how many bytes it has grown since, at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    return lambda: _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _whole(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


@torch.no_grad()
def _logits(parts: Parts, plan: RunPlan, rank: int, world: int, tokens: Tensor) -> Tensor | None:
    assert plan.parallel is not None
    depth, neighbours = plan.parallel.pipeline, world // plan.parallel.pipeline
    place = rank // neighbours
    (stage,) = parts.stages
    stage.eval()
    value = tokens
    if place > 0:
        value = torch.empty(*_stream_shape(plan, tokens), dtype=torch.float32)
        dist.recv(value, rank - neighbours)
    output = stage(value)
    if place < depth - 1:
        dist.send(output.contiguous(), rank + neighbours)
        return None
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return whole[..., : plan.config.model.vocab_size]  # a padded vocabulary has more


def _stream_shape(plan: RunPlan, tokens: Tensor) -> tuple[int, int, int]:
    """Of what a stage hands on: cut along the sequence under sequence parallelism."""
    assert plan.parallel is not None
    cut = plan.parallel.tensor if plan.config.parallel.sequence_parallel else 1
    return tokens.shape[0], tokens.shape[1] // cut, plan.config.model.hidden_size
