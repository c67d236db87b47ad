"""Degrees, the order of the mesh, and which rank sits where.

Owns the arithmetic between a rank, its coordinates and its GPU. The mesh order is fixed, outermost to innermost:
pipeline, data, context, tensor, so that neighbours in a tensor group are neighbours on a node. Refuses nothing:
`validate/` has judged the degrees before they come here. `placement/` matches this table with the nodes that really
came.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.plan.inventory import Inventory
from orchestrator.plan.run_plan import RankPlace

MESH_ORDER = ("pipeline", "data", "context", "tensor")
"""Axes of the mesh, outermost first. Tensor groups talk in every layer and must be closest together; the article's rule
(tensor inside a node, then pipeline, data outermost) concerns which links a degree may use, and pipeline neighbours
talk least, so that they may lie farthest apart."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Sizes of the four axes; all at least 1."""

    pipeline: int
    data: int
    context: int
    tensor: int

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.pipeline * self.data * self.context * self.tensor


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Position of a rank on the four axes; each from 0."""

    pipeline: int
    data: int
    context: int
    tensor: int


def coordinates_of(rank: int, degrees: Degrees) -> Coordinates:
    """Coordinates of `rank` (0 <= rank < world size)."""
    rest, tensor = divmod(rank, degrees.tensor)
    rest, context = divmod(rest, degrees.context)
    pipeline, data = divmod(rest, degrees.data)
    return Coordinates(pipeline, data, context, tensor)


def rank_of(coordinates: Coordinates, degrees: Degrees) -> int:
    """Rank at `coordinates`; the inverse of `coordinates_of`."""
    rank = coordinates.pipeline * degrees.data + coordinates.data
    rank = rank * degrees.context + coordinates.context
    return rank * degrees.tensor + coordinates.tensor


def slots(inventory: Inventory, tensor: int) -> Iterator[tuple[int, int]]:
    """(node, gpu) of every GPU that a rank can have, node by node, leaving out what is less than a tensor group."""
    node = 0
    for kind in inventory.kinds:
        used = kind.gpus_per_node // tensor * tensor
        count = 0
        while kind.nodes is None or count < kind.nodes:
            yield from ((node, gpu) for gpu in range(used))
            node, count = node + 1, count + 1


def place_ranks(degrees: Degrees, inventory: Inventory) -> tuple[RankPlace, ...]:
    """The rank table on whole nodes taken in order.

    Ranks are consecutive on a node, so that a tensor group, whose ranks are consecutive and whose size fits into each
    node's share a whole number of times, never crosses one.

    Raises:
        ValueError: there are fewer slots than ranks (validation refuses such a plan before).
    """
    free = slots(inventory, degrees.tensor)
    places = []
    for rank in range(degrees.world_size):
        slot = next(free, None)
        if slot is None:
            raise ValueError(f"{degrees.world_size} ranks do not fit on {inventory.describe()}")
        where = coordinates_of(rank, degrees)
        places.append(RankPlace(rank, *slot, where.data, where.pipeline, where.context, where.tensor))
    return tuple(places)


def nodes_needed(world_size: int, tensor: int, gpus_per_node: int) -> int:
    """Fewest like nodes that hold `world_size` ranks in whole tensor groups (`tensor` <= `gpus_per_node`)."""
    used = gpus_per_node // tensor * tensor
    return -(-world_size // used)
