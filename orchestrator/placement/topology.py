"""What placement computes with: nodes, shares and slots as frozen values, and the need of a plan.

A *slot* is one GPU of one node (one process, for `device: cpu`). A *share* is the part of a node that one supervisor
holds: a whole number of tensor-parallel groups. Nothing here asks a machine or a cluster; `launch/inventory.py` reads
one and `shares.py` and `assign.py` decide over it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class Node:
    """A machine as the cluster reports it."""

    node_id: str
    """The cluster's own id; unique even where several nodes share an address."""
    name: str
    """What a person calls it: host name or address."""
    slots_total: int
    """GPUs (CPU slots, for `device: cpu`) that it has."""
    slots_free: int
    """Of those, the ones that nobody holds now."""
    kind: str = ""
    """Kind of GPU as reported; empty when unknown."""
    domain: str = ""
    """Rack or NVLink domain: nodes of one domain are close to each other; empty when unknown."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """All labels that the cluster gives it."""
    leaving: bool = False
    """Whether it is about to be taken away: nothing is placed on it."""
    silent: bool = False
    """Whether it does not answer, whatever the cluster still says of it: it is lost, and nothing is placed on it."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a plan asks of the nodes."""

    world_size: int
    """Ranks; each takes one slot."""
    tensor: int
    """Ranks of a tensor-parallel group; they never lie on two nodes."""
    slots_per_node: int
    """Most slots of one node that the plan may use, as declared by `cluster.gpus_per_node`."""
    noun: str = "GPU"
    """What a slot is called in messages."""
    kinds: tuple[str, ...] = ()
    """Kinds of GPU of which the nodes must have one; empty: any. A node that does not say its kind counts."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""

    @property
    def groups(self) -> int:
        """Tensor-parallel groups."""
        return self.world_size // self.tensor


@dataclass(frozen=True, slots=True)
class ShareChoice:
    """Which nodes shall hold how many shares; all shares have one size."""

    share_size: int
    """Slots of one share: a multiple of `tensor`."""
    node_ids: tuple[str, ...]
    """Node of each share."""


@dataclass(frozen=True, slots=True)
class LocatedShare:
    """A share where it really came to lie, as its supervisor reports it."""

    share: int
    """Number of the supervisor."""
    node_id: str
    node_name: str
    devices: tuple[int, ...]
    """Device numbers that it holds on its node, ascending."""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """One rank on its slot, with its coordinates in the mesh."""

    rank: int
    share: int
    local_rank: int
    """Index among the ranks of its share."""
    node_id: str
    node_name: str
    node: int
    """Number of the node, in the order in which nodes are filled."""
    device: int
    """Device number on the node."""
    data: int
    pipeline: int
    context: int
    tensor: int


def same_kind(asked: str, reported: str) -> bool:
    """Whether two names can mean one kind of GPU: each word of the one is a word of the other, or two of its words.

    `A100-80GB` is an `A100` and an `A100-80G`, not an `A100-40G`; `MI300X` is an `AMD-Instinct-MI300X-OAM`, and
    `RTX4090` a `GeForce-RTX-4090`.
    """
    one, other = _words(asked), _words(reported)
    return set(one) <= _joined(other) or set(other) <= _joined(one)


def _words(name: str) -> list[str]:
    words = re.split(r"[^A-Z0-9]+", name.upper())
    return [re.sub(r"^(\d+)GB$", r"\1G", word) for word in words if word]


def _joined(words: list[str]) -> set[str]:
    return {*words, *(first + second for first, second in itertools.pairwise(words))}


def need_of(plan: RunPlan) -> Need:
    """What `plan` asks of the nodes. The plan must be feasible (its `parallel` is decided)."""
    if plan.parallel is None:
        raise ValueError("a plan without decided degrees cannot be placed")
    cluster = plan.config.cluster
    groups = cluster.node_groups
    cuda = cluster.device == "cuda"
    gpus = [group.gpu for group in groups] or [cluster.gpu]
    return Need(
        world_size=plan.parallel.world_size,
        tensor=plan.parallel.tensor,
        slots_per_node=max((group.gpus_per_node for group in groups), default=cluster.gpus_per_node),
        noun="GPU" if cuda else "CPU slot",
        kinds=tuple(dict.fromkeys(gpu.name for gpu in gpus)) if cuda else (),
        labels=cluster.require_labels,
    )
