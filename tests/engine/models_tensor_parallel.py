"""The sharding words in torch's own tensor-parallel styles, and one comparison under them: run inside gloo ranks.

An independent reading of `models/parameters.py` (`Style`), so that a table that is wrong is seen without the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from models.parameters import Style
from models.registry import family
from models.spec import parameter_specs
from orchestrator.config.schema.model import ModelConfig
from tests.engine.small_models import build_random, matches


class Replicated(ParallelStyle):
    """Parameters and input whole on every rank; the output whole, or cut along `output`."""

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any) -> Any:
            return tuple(DTensor.from_local(one, device_mesh, [Replicate()]) for one in inputs)

        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            return output.redistribute(placements=[self.output]).to_local()

        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(whole))
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class Untouched(ParallelStyle):
    """Nothing to do where no dropout is asked for."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


def torch_style(word: Style, sequence_parallel: bool) -> ParallelStyle:
    """What a word of the table means in torch."""
    stream = Shard(1) if sequence_parallel else Replicate()
    styles: dict[Style, ParallelStyle] = {
        "vocabulary_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "scatter_output": Replicated(stream),
        "norm": SequenceParallel() if sequence_parallel else Replicated(Replicate()),
        "gather_input": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=stream),
        "vocabulary_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
        "stream_dropout": Untouched(),
        "head_dropout": Untouched(),
    }
    return styles[word]


def largest_differences(rank: int, world: int, cases: list[tuple[ModelConfig, bool]]) -> list[dict[str, float]]:
    """For each (sizes, sequence parallel): difference of loss and of every gradient to the module in one piece."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    return [_compare(sizes, sequence_parallel, mesh) for sizes, sequence_parallel in cases]


def _compare(sizes: ModelConfig, sequence_parallel: bool, mesh: DeviceMesh) -> dict[str, float]:
    whole, cut = build_random(sizes), build_random(sizes)
    styles = family(sizes.family).sharding_table(sizes).styles
    names = [name for name, _ in cut.named_modules()]
    plan = {
        name: torch_style(word, sequence_parallel)
        for pattern, word in styles
        for name in names
        if matches(pattern, name)
    }
    parallelize_module(cut, mesh, plan)
    cut.tie_weights()
    dims = {spec.name: spec.tensor_dim for spec in parameter_specs(sizes)}
    for name, parameter in cut.named_parameters():
        dim = dims[name]
        assert parameter.placements == ((Replicate(),) if dim is None else (Shard(dim),)), name
    generator = torch.Generator().manual_seed(8)
    tokens, labels = torch.randint(sizes.vocab_size, (2, 2, 16), generator=generator)
    losses = [functional.cross_entropy(one(tokens).flatten(0, 1), labels.flatten()) for one in (whole, cut)]
    torch.autograd.backward(losses)
    expected = dict(whole.named_parameters())
    scale = max(float(parameter.grad.abs().max()) for parameter in expected.values())
    differences = {
        name: float((parameter.grad.full_tensor() - expected[name].grad).abs().max()) / scale
        for name, parameter in cut.named_parameters()
    }
    return {"loss": abs(float(losses[0].detach() - losses[1].detach())), **differences}
