"""Tied embeddings over a pipeline: two copies of one weight, on the first and the last stage, kept equal.

Both copies start from the same values, their gradients are summed over the two stages before the optimizer's step, and
the norm and a checkpoint know the weight once. Where one stage holds both ends the module itself shares the weight and
nothing is to be done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from models.parameters import ParameterSpec
from orchestrator.engine.gradients import local
from orchestrator.engine.mesh import Mesh
from orchestrator.plan.run_plan import ParallelFacts


@dataclass(frozen=True, slots=True)
class TiedCopies:
    """This rank's copies of a weight that two stages share; none on the ranks between."""

    original: str
    """Name of the weight on the first stage, under which it is saved."""
    copy: str
    """Name of its copy on the last stage."""
    held: tuple[nn.Parameter, ...]
    """One, or both where one rank holds the first and the last stage."""
    group: dist.ProcessGroup | None
    """The two ranks that hold a copy each; None where one rank holds both."""

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients (collective over the two ranks)."""
        parts = [local(parameter.grad) for parameter in self.held if parameter.grad is not None]
        if len(parts) == 2:
            parts[0].add_(parts[1])
            parts[1].copy_(parts[0])
        elif parts and self.group is not None:
            dist.all_reduce(parts[0], group=self.group)


def tied_copies(
    parallel: ParallelFacts, mesh: Mesh, parameters: Mapping[str, nn.Parameter], specs: Sequence[ParameterSpec]
) -> TiedCopies | None:
    """The copies of a tied weight; None where nothing is tied over stages (collective)."""
    tied = [spec for spec in specs if spec.tied_to is not None]
    if not tied or len(parallel.stage_layers) == 1:
        return None
    (spec,) = tied
    assert spec.tied_to is not None
    first, last = mesh.holder[0], mesh.holder[-1]
    group = None
    if first != last:
        ranks = mesh.whole.mesh.movedim(0, -1)[..., [first, last]].reshape(-1, 2).tolist()
        group = dist.new_subgroups_by_enumeration(ranks)[0]  # type: ignore[no-untyped-call]
    held = tuple(parameters[name] for name in (spec.tied_to, spec.name) if name in parameters)
    return TiedCopies(spec.tied_to, spec.name, held, group)


@torch.no_grad()
def copy_original(tied: TiedCopies, optimizer: torch.optim.Optimizer) -> None:
    """After loading, where one rank holds both copies and a checkpoint gives the original alone."""
    if len(tied.held) != 2:
        return
    original, copy = tied.held
    local(copy).copy_(local(original))
    for key, value in optimizer.state[original].items():
        local(optimizer.state[copy][key]).copy_(local(value))
