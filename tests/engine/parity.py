"""Runs the engine's own build and step on given batches and gives back whole tensors, to be held against
`reference.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.registry import family
from tests.engine import reference
from tests.engine.cases import tiny_plan
from tests.engine.reference import IGNORED, PLAIN, Recipe, Trace

Mask = Literal["none", "ragged", "first rank empty", "all empty"]
STEPS = 5


@dataclass(frozen=True)
class Case:
    """One plan with the data that it is to be trained on."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the tiny configuration."""
    mask: Mask = "none"
    recipe: Recipe = PLAIN

    def plan(self) -> Any:
        """The plan, with the recipe's optimizer."""
        recipe = self.recipe
        optimizer = {
            "optimizer__name": recipe.optimizer,
            "optimizer__lr": recipe.lr,
            "optimizer__weight_decay": recipe.weight_decay,
        }
        return tiny_plan(training__gradient_clip=recipe.clip, **optimizer, **self.changes)


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """The global batches of a case: inputs and labels [global batch, sequence], a function of the step alone."""
    config = case.plan().config
    rows, length = config.training.global_batch_size, config.training.sequence_length
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 + step)
        # Few distinct tokens, so that five steps can learn something.
        tokens = torch.randint(0, 8, (rows, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if case.mask == "ragged":
            lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
            labels[torch.arange(length)[None, :] >= lengths] = IGNORED
        elif case.mask == "first rank empty":
            labels[: rows // config.parallel.data] = IGNORED
            labels[-1, 3:] = IGNORED
        elif case.mask == "all empty":
            labels[:] = IGNORED
        found.append((tokens[:, :-1], labels))
    return found


def run_cases(rank: int, world: int, cases: list[Case]) -> list[tuple[dict[str, Tensor], Trace]]:
    """For every case: the initial weights and what came of the training, whole tensors (collective, on every rank)."""
    return [_run(case) for case in cases]


def _run(case: Case) -> tuple[dict[str, Tensor], Trace]:
    from orchestrator.engine.build import build
    from orchestrator.engine.mesh import build_mesh
    from orchestrator.engine.step import MicroBatch, train_step

    plan = case.plan()
    mesh = build_mesh(plan.parallel, "cpu")
    parts = build(plan, mesh, torch.device("cpu"))
    initial = {name: whole(parameter.detach()) for name, parameter in parts.parameters.items()}
    trace = Trace()

    def keep_gradients(*_: Any) -> None:
        trace.gradients.append({name: whole(p.grad) for name, p in parts.parameters.items()})

    parts.optimizer.register_step_pre_hook(keep_gradients)
    size = plan.config.training.micro_batch_size
    for inputs, labels in batches(case):
        own = inputs.shape[0] // mesh.data_ranks
        rows = slice(mesh.data_rank * own, (mesh.data_rank + 1) * own)
        micro = [MicroBatch(*pair) for pair in zip(inputs[rows].split(size), labels[rows].split(size), strict=True)]
        result = train_step(parts, micro, int((labels != IGNORED).sum()))
        trace.losses.append(result.loss)
        trace.norms.append(result.gradient_norm)
    trace.weights = {name: whole(parameter.detach()) for name, parameter in parts.parameters.items()}
    return initial, trace


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor behind a distributed one, a copy."""
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def expected(case: Case, initial: dict[str, Tensor]) -> Trace:
    """What the reference makes of the same case from the same weights."""
    import importlib

    config = case.plan().config
    module, name = family(config.model.family).module.split(":")
    model = getattr(importlib.import_module(module), name)(config.model)
    torch.set_num_threads(1)
    return reference.train(model, initial, batches(case), case.recipe)
