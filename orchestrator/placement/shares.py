"""Which nodes hold the ranks: `choose_shares`, and the refusal with its arithmetic when they cannot.

A tensor-parallel group never lies on two nodes, so a node offers `free slots // tensor` groups and the rest of its
slots stays idle. Fewest domains (racks, NVLink domains) first, then fewest nodes, then the tightest fit, so that a
run's ranks are close to each other and whole nodes are left to others. All shares have one size, because Ray Train
gives all its workers the same resources; the size is the greatest that divides every node's part.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.errors import PlacementError, Problem
from orchestrator.placement.topology import Need, Node, ShareChoice, same_kind

_NODES_SPELLED_OUT = 12
"""Nodes that a message lists one by one; more are counted by what they hold."""


def choose_shares(nodes: Sequence[Node], need: Need) -> ShareChoice:
    """Share size and node of every share, for what is free now.

    Raises `PlacementError` with the arithmetic when the free slots do not hold the plan.
    """
    usable = usable_nodes(nodes, need)
    offers = {node.node_id: groups for node in usable if (groups := _groups(node.slots_free, need))}
    if sum(offers.values()) < need.groups:
        raise PlacementError(_refusal(nodes, need, busy=fits_when_free(nodes, need)))
    domains = {node.node_id: node.domain for node in usable}
    chosen = _chosen(offers, domains, need.groups)
    groups_per_share = math.gcd(*(groups for _, groups in chosen))
    return ShareChoice(
        share_size=groups_per_share * need.tensor,
        node_ids=tuple(node_id for node_id, groups in chosen for _ in range(groups // groups_per_share)),
    )


def fits_when_free(nodes: Sequence[Node], need: Need) -> bool:
    """Whether the plan would fit if nobody else held a slot: waiting can help then, and cannot otherwise."""
    return sum(_groups(node.slots_total, need) for node in usable_nodes(nodes, need)) >= need.groups


def usable_nodes(nodes: Sequence[Node], need: Need) -> list[Node]:
    """Nodes that ranks may be placed on: of a kind that is asked for, with the labels, there and about to stay."""
    return [node for node in nodes if _stays(node) and _labelled(node, need) and _of_kind(node, need)]


def _stays(node: Node) -> bool:
    return not node.leaving and not node.silent


def _of_kind(node: Node, need: Need) -> bool:
    return not need.kinds or not node.kind or any(same_kind(kind, node.kind) for kind in need.kinds)


def _labelled(node: Node, need: Need) -> bool:
    return all(node.labels.get(name) == value for name, value in need.labels.items())


def _groups(slots: int, need: Need) -> int:
    return min(slots, need.slots_per_node) // need.tensor


def _chosen(offers: Mapping[str, int], domains: Mapping[str, str], groups: int) -> list[tuple[str, int]]:
    """(node, groups taken), nodes of one domain together, the largest first; sums to `groups`."""
    members: dict[str, list[str]] = defaultdict(list)
    for node_id in sorted(offers):
        members[domains[node_id]].append(node_id)
    capacity = {domain: sum(offers[node_id] for node_id in ids) for domain, ids in members.items()}
    enough = [domain for domain in capacity if capacity[domain] >= groups]
    if enough:
        packed = {domain: _tightest({n: offers[n] for n in members[domain]}, groups) for domain in enough}
        best = min(enough, key=lambda domain: (len(packed[domain]), _surplus(packed[domain], offers, groups), domain))
        nodes = packed[best]
    else:
        joined = [node_id for domain in _fewest_domains(capacity, groups) for node_id in members[domain]]
        nodes = _tightest({node_id: offers[node_id] for node_id in joined}, groups)
    taken: list[tuple[str, int]] = []
    left = groups
    for node_id in sorted(nodes, key=lambda n: (-offers[n], domains[n], n)):
        part = min(offers[node_id], left)
        taken.append((node_id, part))
        left -= part
    return sorted(taken, key=lambda item: (domains[item[0]], -item[1], item[0]))


def _surplus(nodes: Iterable[str], offers: Mapping[str, int], groups: int) -> int:
    return sum(offers[node_id] for node_id in nodes) - groups


def _fewest_domains(capacity: Mapping[str, int], groups: int) -> list[str]:
    """The largest domains, and as the last the smallest that completes the sum."""
    order = sorted(capacity, key=lambda domain: (-capacity[domain], domain))
    joined: list[str] = []
    left = groups
    for index, domain in enumerate(order):
        if capacity[domain] >= left:
            joined.append(min((d for d in order[index:] if capacity[d] >= left), key=lambda d: (capacity[d], d)))
            return joined
        joined.append(domain)
        left -= capacity[domain]
    raise AssertionError("the caller has seen that the sum suffices")


def _tightest(offers: Mapping[str, int], groups: int) -> list[str]:
    """The fewest nodes that offer `groups` together and, among those, the ones that leave the least over.

    Exact: the largest offers give the number of nodes, and the surplus is then taken down by exchanging chosen nodes
    for smaller spare ones. Relative to the smallest chosen offer every exchange only takes away, so that what can be
    reached is a small knapsack, no larger than the surplus.
    """
    order = sorted(offers, key=lambda n: (-offers[n], n))
    count, held = 0, 0
    while held < groups:
        held += offers[order[count]]
        count += 1
    surplus = held - groups
    if not surplus:
        return order[:count]
    pivot = offers[order[count - 1]]
    dropped = _reachable(Counter(offers[n] - pivot for n in order[:count]), surplus)
    added = _reachable(Counter(pivot - offers[n] for n in order[count:]), surplus)
    best, swaps = 0, 0
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for (number, less), dropped_values in dropped.items():
        for more in range(surplus - less + 1):
            total = less + more
            if (number, more) in added and (total > best or (total == best and number < swaps)):
                best, swaps = total, number
                out, into = Counter(dropped_values), Counter(added[(number, more)])
    kept: list[str] = []
    for node_id in reversed(order[:count]):
        value = offers[node_id] - pivot
        if out[value]:
            out[value] -= 1
        else:
            kept.append(node_id)
    for node_id in order[count:]:
        value = pivot - offers[node_id]
        if into[value]:
            into[value] -= 1
            kept.append(node_id)
    return kept


def _reachable(available: Counter[int], limit: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """(how many, their sum) -> the values, for sums up to `limit` of at most `limit` of the values at hand."""
    reached: dict[tuple[int, int], tuple[int, ...]] = {(0, 0): ()}
    for value in sorted(available):
        most = min(available[value], limit // value if value else limit)
        for (number, total), values in list(reached.items()):
            for times in range(1, most + 1):
                key = (number + times, total + times * value)
                if key[0] > limit or key[1] > limit:
                    break
                reached.setdefault(key, (*values, *(value,) * times))
    return reached


def _refusal(nodes: Sequence[Node], need: Need, *, busy: bool) -> Problem:
    unit = (
        f"{need.groups} TP groups of {need.tensor} {need.noun}s" if need.tensor > 1 else _count(need.groups, need.noun)
    )
    usable = usable_nodes(nodes, need)
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
    message += _not_counted(nodes, need)
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


def _not_counted(nodes: Sequence[Node], need: Need) -> str:
    """Which nodes are there and may not be used, and why: each under the first reason that holds."""
    silent = [node for node in nodes if node.silent]
    leaving = [node for node in nodes if node.leaving and not node.silent]
    unlabelled = [node for node in nodes if _stays(node) and not _labelled(node, need)]
    others = [node for node in nodes if _stays(node) and _labelled(node, need) and not _of_kind(node, need)]
    text = ""
    if silent:
        text += f"; {_count(len(silent), 'node')} that {'does' if len(silent) == 1 else 'do'} not answer not counted"
    if leaving:
        text += f"; {_count(len(leaving), 'node')} about to be taken away not counted"
    if unlabelled:
        asked = ", ".join(f"{name}={value}" for name, value in need.labels.items())
        text += (
            f"; {_count(len(unlabelled), 'node')} without the label{'s' * (len(need.labels) > 1)} {asked} not counted"
        )
    if others:
        kinds = ", ".join(sorted({node.kind for node in others}))
        text += (
            f"; {_count(len(others), 'node')} of another kind than {' or '.join(need.kinds)} ({kinds}) not counted "
            "(cluster.gpu)"
        )
    return text


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
