"""The ordered set-up of a rank's part of the model: one call a line, each in the only order that works.

The list, in full: meta device, pipeline cut, tensor parallel, activation checkpointing, compile, data parallel,
allocate, initialise, optimizer, load checkpoint (`state.py`, called by `rank.py`, which knows where from). Nothing here
validates: what the engine cannot run is refused by `plan/engine_rules.py` before a process starts.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn

from models.registry import family
from models.spec import parameter_specs
from orchestrator.engine.compilation import apply_compile
from orchestrator.engine.data_parallel import apply_data_parallel
from orchestrator.engine.gradients import counted_once
from orchestrator.engine.initialise import initialise
from orchestrator.engine.mesh import Mesh
from orchestrator.engine.optimizer import build_optimizer
from orchestrator.engine.precision import master_dtype, mixed_precision_policy
from orchestrator.engine.recompute import apply_recompute
from orchestrator.engine.step import Parts
from orchestrator.plan.run_plan import RunPlan


def build(plan: RunPlan, mesh: Mesh, device: torch.device) -> Parts:
    """Build this rank's part of the plan's model, wrapped, allocated on `device` and initialised (collective)."""
    config = plan.config
    specs = parameter_specs(config.model)
    table = family(config.model.family).sharding_table(config.model)
    policy = mixed_precision_policy(config.training.precision)

    model = stage_on_meta(plan, mesh)
    blocks = list(model.get_submodule(table.layers).children())
    dropout = config.model.attention_dropout > 0 or config.model.resid_pdrop > 0
    apply_recompute(blocks, config.training.activation_checkpointing, dropout=dropout)
    if config.training.compile:
        apply_compile(blocks)
    data_parallel = apply_data_parallel(model, mesh, config.parallel, table, policy)
    allocate(model, device, offload=config.parallel.offload == "all")
    parameters = dict(model.named_parameters())
    initialise(parameters, specs, config.training.seed)
    optimizer = build_optimizer(config.optimizer, parameters, specs)
    return Parts(
        model=model,
        data_parallel=data_parallel,
        parameters=parameters,
        counted=counted_once(parameters),
        optimizer=optimizer,
        mesh=mesh,
        device=device,
        gradient_clip=config.training.gradient_clip,
    )


def allocate(model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Give the model memory: parameters on the device, or in host memory with `offload`; buffers always on the
    device."""
    model.to_empty(device="cpu" if offload else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    # Also ties the head again, which allocation has untied.
    model.initialise_buffers()  # type: ignore[operator]


def stage_on_meta(plan: RunPlan, mesh: Mesh) -> nn.Module:
    """The layers of this rank's pipeline stage, without memory behind them."""
    model, parallel = plan.config.model, plan.parallel
    assert parallel is not None, "a plan without degrees is not feasible and never reaches a rank"
    first, end = parallel.stage_layers[mesh.pipeline_rank]
    module_name, class_name = family(model.family).module.split(":")
    model_class = getattr(importlib.import_module(module_name), class_name)
    with torch.device("meta"):
        stage: nn.Module = model_class(
            model,
            layers=range(first, end),
            embedding=mesh.pipeline_rank == 0,
            head=mesh.pipeline_rank == mesh.pipeline_ranks - 1,
            sequence_length=plan.config.training.sequence_length,
        )
    return stage.to(master_dtype(plan.config.training.precision))
