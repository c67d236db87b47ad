"""Time of one collective from its payload, its group and the slowest link of the group.

Rings inside a node use NVLink; a group over several nodes is as fast as the network of all its ranks on one node,
because hierarchical rings use every network card of the group there. Bandwidth falls for small payloads through the
latency term. Groups that run at the same time do not slow each other: each GPU has a network share of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Literal

from orchestrator.plan.constants import COLLECTIVE_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS, Fitted
from orchestrator.plan.device import Device

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of one collective and where they lie."""

    ranks: int
    stride: int
    """Distance between neighbours in GPU numbering: tensor groups 1, data groups tensor x ... ."""

    one_card: bool = False
    """Whether the group uses one network card of each node instead of all of its ranks'."""

    def spread(self, gpus_per_node: int) -> tuple[int, int]:
        """(ranks of the group on one node, nodes that it touches)."""
        per_node = max(1, min(self.ranks, gpus_per_node // self.stride))
        return per_node, -(-self.ranks // per_node)


def bus_rate(group: Group, device: Device, fitted: Fitted) -> float | None:
    """Bytes per second that a ring of the group carries; None when the link's rate is not known."""
    if group.ranks == 1:
        return float("inf")
    per_node, nodes = group.spread(device.gpus_per_node)
    inside = None if device.node_rate is None else device.node_rate * fitted.nvlink_share
    if nodes == 1:
        return inside
    if device.network_rate is None:
        return None
    outside = device.network_rate * fitted.network_share * (1 if group.one_card else per_node)
    return outside if per_node == 1 or inside is None else min(inside, outside)


def collective_seconds(
    kind: Kind, payload_bytes: float, calls: float, group: Group, device: Device, fitted: Fitted
) -> float | None:
    """Seconds of `calls` collectives that move `payload_bytes` in all (the whole, unsharded payload of the group)."""
    if group.ranks == 1 or not calls:
        return 0.0
    rate = bus_rate(group, device, fitted)
    if rate is None:
        return None
    rounds = 2 if kind == "all_reduce" else 1
    nodes = group.spread(device.gpus_per_node)[1]
    latency = COLLECTIVE_LATENCY_SECONDS + NETWORK_LATENCY_SECONDS * (log2(nodes) if nodes > 1 else 0.0)
    moved = payload_bytes * (group.ranks - 1) / group.ranks
    return rounds * (moved / rate + calls * latency)
