"""What gloo ranks do in the tests of Hugging Face weights: build a plan, load a folder into it, give logits back.

A stage's output goes to the next one by plain send and receive, so that the logits hang on nothing but the modules and
their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.engine.build import build
from orchestrator.engine.mesh import build_mesh
from orchestrator.engine.start_weights import load_huggingface
from orchestrator.engine.state import after_loading, saved_parameters
from orchestrator.engine.step import Parts
from orchestrator.plan.run_plan import RunPlan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loaded:
    """What one rank has after loading."""

    logits: Tensor | None
    """[b, s, v]; only ranks with the head have them."""
    parameters: dict[str, Tensor]
    """Whole parameters of this rank's stages, gathered; empty where they were not asked for."""


def loaded(rank: int, world: int, plan: RunPlan, folder: Path, tokens: Tensor, gather: bool) -> Loaded:
    """Load the folder under the plan (collective)."""
    torch.set_num_threads(1)
    assert plan.parallel is not None
    parts = build(plan, build_mesh(plan.parallel, "cpu"), CPU)
    load_huggingface(folder, parts, plan.config.model)
    after_loading(parts)
    whole = {name: _whole(parameter) for name, parameter in saved_parameters(parts).items()} if gather else {}
    return Loaded(_logits(parts, plan, rank, world, tokens), whole)


def loaded_under(rank: int, world: int, cases: list[tuple[RunPlan, Path, Tensor]]) -> list[Loaded]:
    """Every case in turn, with weights gathered."""
    return [loaded(rank, world, *case, True) for case in cases]


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
    return output.full_tensor() if isinstance(output, DTensor) else output


def _stream_shape(plan: RunPlan, tokens: Tensor) -> tuple[int, int, int]:
    """Of what a stage hands on: cut along the sequence under sequence parallelism."""
    assert plan.parallel is not None
    cut = plan.parallel.tensor if plan.config.parallel.sequence_parallel else 1
    return tokens.shape[0], tokens.shape[1] // cut, plan.config.model.hidden_size
