"""What follows from a configuration before it is judged: counts, degrees, micro-batches; None where they do not come
out.

`validate/` reads a `Facts` and says what is wrong with it; `make.py` builds the plan from the same values when
nothing is. Nothing is refused and nothing is rounded here.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import RunConfig
from orchestrator.plan import batch, stages
from orchestrator.plan.inventory import Inventory, take_inventory
from orchestrator.plan.layout import Degrees, nodes_needed


@dataclass(frozen=True, slots=True)
class Facts:
    """A configuration with everything that plain counting derives from it."""

    config: RunConfig
    inventory: Inventory
    gpus: int | None
    """GPUs usable by whole tensor groups; None when the number of nodes follows, or a tensor group fits no node."""
    fixed: int
    """tensor x pipeline x context: what the data degree multiplies."""
    data: int | None
    """Data-parallel ranks; None when `auto` leaves no whole number."""
    micro_batches: int | None
    """Of one step and data rank; None when they do not come out whole or `data` is not known."""
    stages: int
    """Virtual stages over all pipeline ranks."""
    stage_layers: tuple[tuple[int, int], ...] | None
    """None when no cut is possible."""

    @property
    def degrees(self) -> Degrees | None:
        """The mesh; None while the data degree is not known."""
        if self.data is None:
            return None
        parallel = self.config.parallel
        return Degrees(parallel.pipeline, self.data, parallel.context, parallel.tensor)

    @property
    def world_size(self) -> int | None:
        """Ranks; None while the data degree is not known."""
        return None if self.data is None else self.data * self.fixed

    @property
    def nodes(self) -> int | None:
        """Nodes of the plan: those declared, or as few as needed for `cluster.nodes=auto`; None when not known."""
        if not self.inventory.open_ended:
            return sum(kind.nodes or 0 for kind in self.inventory.kinds)
        tensor, size = self.config.parallel.tensor, self.inventory.smallest_node
        if self.world_size is None or tensor > size:
            return None
        return nodes_needed(self.world_size, tensor, size)

    @property
    def zero_ranks(self) -> int | None:
        """Ranks that hold the same part of the model: data x context."""
        return None if self.data is None else self.data * self.config.parallel.context

    @property
    def zero_group(self) -> int | None:
        """Ranks that share one sharded copy; 1 for `zero_stage=0`, where every rank has a copy of its own."""
        parallel = self.config.parallel
        if parallel.zero_stage == 0:
            return 1
        return self.zero_ranks if parallel.zero_group == "auto" else parallel.zero_group


def derive(config: RunConfig) -> Facts:
    """Count everything that can be counted."""
    parallel, training = config.parallel, config.training
    inventory = take_inventory(config.cluster)
    fixed = parallel.tensor * parallel.pipeline * parallel.context
    gpus = inventory.usable(parallel.tensor) or None
    data: int | None = None
    if parallel.data != "auto":
        data = parallel.data
    elif gpus is not None and gpus % fixed == 0:
        data = gpus // fixed
    return Facts(
        config=config,
        inventory=inventory,
        gpus=gpus,
        fixed=fixed,
        data=data,
        micro_batches=None
        if data is None
        else batch.micro_batches(training.global_batch_size, training.micro_batch_size, data),
        stages=parallel.pipeline * parallel.virtual_stages,
        stage_layers=stages.cut(config),
    )
