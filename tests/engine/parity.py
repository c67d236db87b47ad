"""Runs the engine's own build and step on given batches and gives back whole tensors, to be held against
`reference.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from models.registry import family
from orchestrator.plan import loss_chunks
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
    double: bool = False
    """Whether everything is computed in FP64, where differences of order vanish and mistakes do not."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of the loss: several chunks a micro-batch, or all of it at once."""
        return loss_chunks.CHUNK_TOKENS if "accumulation" in self.name else 5

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


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    start: tuple[int, ...]
    values: Tensor


@dataclass
class RankTrace:
    """What one rank saw of a training."""

    initial: dict[str, Part] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Part]] = field(default_factory=list)
    weights: dict[str, Part] = field(default_factory=dict)


def run_cases(rank: int, world: int, cases: list[Case]) -> list[RankTrace]:
    """Train every case (collective); each rank gives back its own parts, so that replicas can be compared."""
    return [_run(case) for case in cases]


def _run(case: Case) -> RankTrace:
    from orchestrator.engine.build import build
    from orchestrator.engine.mesh import build_mesh
    from orchestrator.engine.precision import MASTER
    from orchestrator.engine.state import saved_parameters
    from orchestrator.engine.step import MicroBatch, train_step

    plan = case.plan()
    mesh = build_mesh(plan.parallel, "cpu")
    MASTER["fp32"] = torch.float64 if case.double else torch.float32
    with mock.patch.object(loss_chunks, "CHUNK_TOKENS", case.chunk_tokens):
        parts = build(plan, mesh, torch.device("cpu"))
    # A tied weight's copy on the last stage goes by its original's name: the two must be the same bits.
    parameters = saved_parameters(parts)

    def part(name: str, tensor: Tensor) -> Part:
        return _part(parts.padding.logical(name, tensor))

    trace = RankTrace(initial={name: part(name, parameter.detach()) for name, parameter in parameters.items()})

    def keep_gradients(*_: Any) -> None:
        trace.gradients.append({name: part(name, p.grad) for name, p in parameters.items()})

    parts.optimizer.register_step_pre_hook(keep_gradients)
    size = plan.config.training.micro_batch_size
    for inputs, labels in batches(case):
        own = inputs.shape[0] // mesh.data_ranks
        rows = slice(mesh.data_rank * own, (mesh.data_rank + 1) * own)
        micro = [MicroBatch(*pair) for pair in zip(inputs[rows].split(size), labels[rows].split(size), strict=True)]
        result = train_step(parts, micro, int((labels != IGNORED).sum()))
        trace.losses.append(result.loss)
        trace.norms.append(result.gradient_norm)
    trace.weights = {name: part(name, parameter.detach()) for name, parameter in parameters.items()}
    if parts.tied is not None and len(parts.tied.held) == 2:
        assert torch.equal(*(_part(parameter).values for parameter in parts.tied.held))
    return trace


def _part(tensor: Tensor) -> Part:
    from orchestrator.engine.gradients import local
    from orchestrator.engine.initialise import offsets

    return Part(tuple(tensor.shape), tuple(offsets(tensor)), local(tensor).detach().clone())


def together(ranks: list[RankTrace]) -> tuple[dict[str, Tensor], Trace]:
    """Initial weights and trace of the whole model. Fails where ranks hold the same elements but not the same bits."""
    trace = Trace(losses=ranks[0].losses, norms=ranks[0].norms)
    trace.gradients = [_whole([rank.gradients[step] for rank in ranks]) for step in range(len(ranks[0].gradients))]
    trace.weights = _whole([rank.weights for rank in ranks])
    return _whole([rank.initial for rank in ranks]), trace


def _whole(ranks: list[dict[str, Part]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for rank in ranks:
        for name, part in rank.items():
            whole = found.setdefault(name, torch.zeros(part.shape, dtype=part.values.dtype))
            there = filled.setdefault(name, torch.zeros(part.shape, dtype=torch.bool))
            place = tuple(slice(low, low + n) for low, n in zip(part.start, part.values.shape, strict=True))
            held = there[place]
            assert torch.equal(whole[place][held], part.values[held]), f"ranks hold different values of {name}"
            whole[place], there[place] = part.values, True
    assert all(bool(there.all()) for there in filled.values()), "some elements are on no rank"
    return found


def expected(case: Case, initial: dict[str, Tensor]) -> Trace:
    """What the reference makes of the same case from the same weights."""
    import importlib

    config = case.plan().config
    module, name = family(config.model.family).module.split(":")
    model = getattr(importlib.import_module(module), name)(config.model)
    if case.double:
        model.double()
    torch.set_num_threads(1)
    return reference.train(model, initial, batches(case), case.recipe)
