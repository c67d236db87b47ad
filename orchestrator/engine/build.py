"""The ordered set-up of a rank's part of the model: one call a line, each in the only order that works.

The list, in full: meta device, pipeline cut, tensor parallel, activation checkpointing, compile, loss, data parallel,
allocate, initialise, optimizer, load checkpoint (`state.py`, called by `rank.py`, which knows where from). Nothing here
validates: what the engine cannot run is refused by `plan/engine_rules.py` before a process starts.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn

from models.registry import family
from models.spec import parameter_specs
from orchestrator.config.schema import ModelConfig
from orchestrator.engine.attention_kernel import watch_attention
from orchestrator.engine.compilation import apply_compile
from orchestrator.engine.data_parallel import apply_data_parallel
from orchestrator.engine.gradients import counted_once
from orchestrator.engine.head import loss_head
from orchestrator.engine.initialise import initialise
from orchestrator.engine.loss_scale import LossScale
from orchestrator.engine.mesh import Mesh
from orchestrator.engine.optimizer import build_optimizer
from orchestrator.engine.padding import padding_of
from orchestrator.engine.pipeline import build_pipeline
from orchestrator.engine.precision import compute_dtype, master_dtype, mixed_precision_policy
from orchestrator.engine.recompute import apply_recompute
from orchestrator.engine.step import Parts
from orchestrator.engine.tensor_parallel import apply_tensor_parallel
from orchestrator.engine.tied import tied_copies
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.vocabulary import padded_rows


def build(plan: RunPlan, mesh: Mesh, device: torch.device) -> Parts:
    """Build this rank's part of the plan's model, wrapped, allocated on `device` and initialised (collective)."""
    assert plan.parallel is not None, "a plan without degrees is not feasible and never reaches a rank"
    config = plan.config
    specs = parameter_specs(config.model)
    table = family(config.model.family).sharding_table(config.model)
    policy = mixed_precision_policy(config.training.precision)

    stages = [stage_on_meta(plan, stage) for stage in mesh.stages]
    for stage in stages:
        apply_tensor_parallel(stage, mesh.tensor, table, sequence_parallel=config.parallel.sequence_parallel)
    for blocks in (list(stage.get_submodule(table.layers).children()) for stage in stages):
        apply_recompute(blocks, config.training.activation_checkpointing, dropout=has_dropout(config.model))
        if config.training.compile:
            apply_compile(blocks)
    attention = watch_attention(stages, table, compiled=config.training.compile)
    head = loss_head(plan, mesh, stages, table)
    data_parallel = [apply_data_parallel(stage, mesh, config.parallel, table, policy) for stage in stages]
    for stage in stages:
        allocate(stage, device, offload=config.parallel.offload == "all")
    parameters = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    padding = padding_of(plan, specs, table)
    padding.clear(parameters)
    logical = {name: padding.logical(name, parameter) for name, parameter in parameters.items()}
    initialise(logical, specs, config.training.seed)
    tied = tied_copies(plan.parallel, mesh, parameters, specs)
    optimizer = build_optimizer(config.optimizer, parameters, specs)
    return Parts(
        stages=tuple(stages),
        data_parallel=tuple(data_parallel),
        pipeline=build_pipeline(
            plan, mesh, stages, data_parallel, head, compute_dtype(config.training.precision), device
        ),
        head=head,
        tied=tied,
        parameters=parameters,
        padding=padding,
        counted=counted_once(parameters) - {spec.name for spec in specs if spec.tied_to is not None},
        optimizer=optimizer,
        mesh=mesh,
        device=device,
        attention=attention,
        gradient_clip=config.training.gradient_clip,
        loss_scale=LossScale() if config.training.precision == "fp16_mixed" else None,
    )


def has_dropout(model: ModelConfig) -> bool:
    """Whether the model draws masks in training."""
    return model.attention_dropout > 0 or model.resid_pdrop > 0


def allocate(model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Give the model memory: parameters on the device, or in host memory with `offload`; buffers always on the
    device."""
    model.to_empty(device="cpu" if offload else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    # Also ties the head again, which allocation has untied.
    model.initialise_buffers()  # type: ignore[operator]


def stage_on_meta(plan: RunPlan, stage: int) -> nn.Module:
    """The layers of a virtual pipeline stage, without memory behind them."""
    parallel = plan.parallel
    assert parallel is not None, "a plan without degrees is not feasible and never reaches a rank"
    rows = padded_rows(plan.config.model.vocab_size, parallel)
    model = plan.config.model.model_copy(update={"vocab_size": rows})
    first, end = parallel.stage_layers[stage]
    module_name, class_name = family(model.family).module.split(":")
    model_class = getattr(importlib.import_module(module_name), class_name)
    with torch.device("meta"):
        module: nn.Module = model_class(
            model,
            layers=range(first, end),
            embedding=stage == 0,
            head=stage == len(parallel.stage_layers) - 1,
            sequence_length=plan.config.training.sequence_length,
        )
    return module.to(master_dtype(plan.config.training.precision))
