"""Which nodes hold the ranks: `choose_shares`, and the refusal with its arithmetic when they cannot.

A tensor-parallel group never lies on two nodes, so a node offers `free slots // tensor` groups and the rest of its
slots stays idle. Fewest nodes first, then the tightest fit, so that whole nodes are left to others. All shares have
one size, because Ray Train gives all its workers the same resources; the size is the greatest that divides every
node's part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.errors import PlacementError, Problem
from orchestrator.placement.topology import Need, Node, ShareChoice

_NODES_SPELLED_OUT = 12
"""Nodes that a message lists one by one; more are counted by what they hold."""


def choose_shares(nodes: Sequence[Node], need: Need) -> ShareChoice:
    """Share size and node of every share, for what is free now.

    Raises `PlacementError` with the arithmetic when the free slots do not hold the plan.
    """
    usable = _usable(nodes, need)
    offers = {node.node_id: _groups(node.slots_free, need) for node in usable}
    if sum(offers.values()) < need.groups:
        raise PlacementError(_refusal(nodes, need, busy=fits_when_free(nodes, need)))
    chosen = _tightest(offers, need.groups, {node.node_id: node.domain for node in usable})
    groups_per_share = math.gcd(*(groups for _, groups in chosen))
    return ShareChoice(
        share_size=groups_per_share * need.tensor,
        node_ids=tuple(node_id for node_id, groups in chosen for _ in range(groups // groups_per_share)),
    )


def fits_when_free(nodes: Sequence[Node], need: Need) -> bool:
    """Whether the plan would fit if nobody else held a slot: waiting can help then, and cannot otherwise."""
    return sum(_groups(node.slots_total, need) for node in _usable(nodes, need)) >= need.groups


def _usable(nodes: Sequence[Node], need: Need) -> list[Node]:
    return [node for node in nodes if not need.kind or need.kind == node.kind]


def _groups(slots: int, need: Need) -> int:
    return min(slots, need.slots_per_node) // need.tensor


def _tightest(offers: dict[str, int], groups: int, domains: dict[str, str]) -> list[tuple[str, int]]:
    """(node, groups taken) with the fewest nodes and, among those, little left over on them; sums to `groups`."""
    # Largest offers first; equal offers by domain, so that the nodes of a run are close to each other.
    order = sorted((n for n in offers if offers[n]), key=lambda n: (-offers[n], domains[n], n))
    chosen: list[str] = []
    held = 0
    for node_id in order:
        if held >= groups:
            break
        chosen.append(node_id)
        held += offers[node_id]
    surplus = held - groups
    spare = order[len(chosen) :]
    for index in reversed(range(len(chosen))):
        node_id = chosen[index]
        if not surplus:
            break
        # The smallest unused offer that still covers the sum takes this node's place.
        fitting = [other for other in spare if 0 < offers[node_id] - offers[other] <= surplus]
        if fitting:
            best = min(fitting, key=lambda n: (offers[n], domains[n], n))
            spare[spare.index(best)] = node_id
            surplus -= offers[node_id] - offers[best]
            chosen[index] = best
    taken: list[tuple[str, int]] = []
    left = groups
    for node_id in sorted(chosen, key=lambda n: (-offers[n], domains[n], n)):
        part = min(offers[node_id], left)
        taken.append((node_id, part))
        left -= part
    return taken


def _refusal(nodes: Sequence[Node], need: Need, *, busy: bool) -> Problem:
    unit = (
        f"{need.groups} TP groups of {need.tensor} {need.noun}s" if need.tensor > 1 else _count(need.groups, need.noun)
    )
    usable = _usable(nodes, need)
    others = len(nodes) - len(usable)
    held = [_groups(node.slots_free, need) for node in usable]
    message = f"needs {unit}; {_holds(held)}"
    if any(node.slots_free > need.slots_per_node for node in usable):
        message += (
            f" (at most {_count(need.slots_per_node, need.noun)} of each node may be used: cluster.gpus_per_node)"
        )
    split = sum(min(node.slots_free, need.slots_per_node) for node in usable)
    if split >= need.world_size:
        message += (
            f". {split} {need.noun}s are free in all, but a TP group must lie on one node: "
            f"free per node {_list([node.slots_free for node in usable])}"
        )
    if others:
        message += f"; {_count(others, 'node')} of another kind than {need.kind} not counted"
    if busy:
        fix = "Others hold the rest now: wait for them, or raise fault_tolerance.placement_timeout_seconds."
        return Problem("cluster", message + ".", fix)
    most = max((_groups(node.slots_total, need) for node in usable), default=0)
    if need.tensor > 1 and not most:
        largest = max((min(node.slots_total, need.slots_per_node) for node in usable), default=0)
        fix = f"No node has {need.tensor} {need.noun}s: set parallel.tensor to at most {largest}." if largest else ""
    else:
        total = sum(_groups(node.slots_total, need) for node in usable) * need.tensor
        fix = (
            f"Plan for at most {_count(total, need.noun)}, or add nodes." if total else f"Add nodes with {need.noun}s."
        )
    return Problem("cluster", message + ".", fix or f"Add nodes with {need.noun}s.")


def _holds(held: Sequence[int]) -> str:
    if not held:
        return "no node has any"
    verb = "holds" if len(held) == 1 else "hold"
    return f"{_count(len(held), 'node')} {verb} {_list(held)}"


def _list(values: Sequence[int]) -> str:
    if len(values) <= _NODES_SPELLED_OUT:
        return " + ".join(str(value) for value in values)
    counts = sorted({value: values.count(value) for value in values}.items(), reverse=True)
    return " + ".join(f"{count} x {value}" for value, count in counts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
