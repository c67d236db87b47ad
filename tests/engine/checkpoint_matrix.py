"""Trains, saves, resumes and loads under many plans inside one launch of ranks; for `test_checkpoint_matrix.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.core.run_cases import manifest_of
from tests.engine.cases import tiny_plan
from tests.engine.parity import Part, _part

MODEL: dict[str, Any] = {"model__num_hidden_layers": 5, "model__tie_word_embeddings": True, "optimizer__lr": 1e-3}
PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "data 2": {"parallel__data": 2},
    "ZeRO 3": {"parallel__data": 2, "parallel__zero_stage": 3},
    "tensor 2": {"parallel__tensor": 2},
    "pipeline 2, cut 4 + 1": {"parallel__pipeline": 2, "parallel__stage_layers": [4, 1]},
    "ZeRO 1": {"parallel__data": 2, "parallel__zero_stage": 1},
    "ZeRO 2 on 4": {"parallel__data": 4, "parallel__zero_stage": 2},
    "pipeline 4, cut 2 + 1 + 1 + 1": {"parallel__pipeline": 4, "parallel__stage_layers": [2, 1, 1, 1]},
    "3D": {"parallel__data": 2, "parallel__tensor": 2, "parallel__pipeline": 2, "parallel__zero_stage": 3},
}
FAST = ("one process", "ZeRO 3", "tensor 2", "pipeline 2, cut 4 + 1")
SAVED_AT, STEPS = 5, 10


def world_of(name: str) -> int:
    """Ranks of a plan."""
    degrees = ("parallel__data", "parallel__tensor", "parallel__pipeline")
    world = 1
    for key in degrees:
        world *= PLANS[name].get(key, 1)
    return world


@dataclass
class Seen:
    """What one rank had of one plan and checkpoint."""

    state: dict[str, Part] = field(default_factory=dict)
    """Weights and moments when it was saved, or after it was loaded."""
    losses: list[float] = field(default_factory=list)
    """Of the steps after that."""
    final: dict[str, Part] = field(default_factory=dict)
    """Weights after those steps."""


class Training:
    """A plan that is built and can be trained on batches that depend on the step alone."""

    def __init__(self, name: str) -> None:
        from orchestrator.engine.build import build
        from orchestrator.engine.mesh import build_mesh

        self.plan = tiny_plan(**MODEL, **PLANS[name])
        self.mesh = build_mesh(self.plan.parallel, "cpu")
        self.parts = build(self.plan, self.mesh, torch.device("cpu"))

    def train(self, first: int, last: int) -> list[float]:
        """Losses of the steps from `first` to `last`."""
        from orchestrator.engine.step import MicroBatch, train_step

        training, losses = self.plan.config.training, []
        for step in range(first, last + 1):
            tokens = torch.randint(
                0, 8, (training.global_batch_size, 17), generator=torch.Generator().manual_seed(1000 + step)
            )
            own = training.global_batch_size // self.mesh.data_ranks
            mine = tokens[self.mesh.data_rank * own : (self.mesh.data_rank + 1) * own].split(training.micro_batch_size)
            batches = [MicroBatch(part[:, :-1], part[:, 1:]) for part in mine]
            losses.append(train_step(self.parts, batches, tokens[:, 1:].numel()).loss)
        return losses

    def state(self) -> dict[str, Any]:
        """What is saved and loaded."""
        from orchestrator.engine.state import state_of

        return state_of(self.parts)

    def held(self) -> dict[str, Part]:
        """This rank's parts of all weights, moments and counters, by the names that they are saved under."""
        state = self.state()
        return {
            f"{part}.{name}": _part(value) for part in ("model", "optimizer") for name, value in state[part].items()
        }

    def load(self, directory: Path) -> None:
        """Go on from the newest checkpoint there."""
        from orchestrator.checkpoint.read import load_newest
        from orchestrator.engine.state import after_loading

        checkpoint, passed_over = load_newest(directory, self.state())
        assert checkpoint is not None
        assert checkpoint.step == SAVED_AT
        assert passed_over == []
        after_loading(self.parts)


def save_under(rank: int, world: int, names: list[str], directory: Path) -> dict[str, tuple[Seen, Seen]]:
    """(unbroken, resumed) of every plan: five steps, a checkpoint, five more; and the same five after a resume."""
    from orchestrator.checkpoint.store import CheckpointWriter

    found = {}
    for name in names:
        training = Training(name)
        training.train(1, SAVED_AT)
        writer = CheckpointWriter(directory / name, 1, asynchronous=True)
        unbroken = Seen(training.held())
        writer.save(SAVED_AT, training.state(), manifest_of(SAVED_AT))
        # The state goes on changing while it is written.
        unbroken.losses = training.train(SAVED_AT + 1, STEPS)
        unbroken.final = training.held()
        writer.close()
        (outcome,) = writer.take_outcomes()
        assert outcome.error is None
        again = Training(name)
        again.load(directory / name)
        resumed = Seen(again.held())
        resumed.losses = again.train(SAVED_AT + 1, STEPS)
        resumed.final = again.held()
        found[name] = (unbroken, resumed)
    return found


def load_under(
    rank: int, world: int, names: list[str], saved: list[str], directory: Path
) -> dict[str, dict[str, Seen]]:
    """For every plan and every other plan's checkpoint: the state after loading, and the loss of the next step."""
    found: dict[str, dict[str, Seen]] = {}
    for name in names:
        training = Training(name)
        found[name] = {}
        for other in saved:
            if other == name:
                continue
            training.load(directory / other)
            seen = Seen(training.held())
            seen.losses = training.train(SAVED_AT + 1, SAVED_AT + 1)
            found[name][other] = seen
    return found


def whole(parts: list[dict[str, Part]]) -> dict[str, Tensor]:
    """All ranks' parts together; fails where ranks hold the same elements but not the same bits."""
    from tests.engine.parity import _whole

    return _whole(parts)
