"""Which rank lies on which slot: a pure function of the plan's table and of where the shares really came to lie.

The plan's table (`plan.ranks`) says which TP groups belong on one node; its order of (node, GPU) is the order in which
real nodes are filled, so that whatever the plan keeps close stays close: context and data neighbours inside a node
first, pipeline neighbours on the next. `verify_placement` compares the result with what every rank reports.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import PlacementError, Problem
from orchestrator.placement.topology import LocatedShare, PlacedRank
from orchestrator.plan.run_plan import RankPlace


def assign_coordinates(planned: Sequence[RankPlace], shares: Sequence[LocatedShare]) -> tuple[PlacedRank, ...]:
    """The slot of every rank, ordered by rank.

    `planned` has one entry a rank; the shares together have as many slots. Raises `PlacementError` when they do not, or
    when a share does not hold whole TP groups.
    """
    tensor = max(place.tensor for place in planned) + 1
    slots = sum(len(share.devices) for share in shares)
    if slots != len(planned):
        raise PlacementError(
            Problem("cluster", f"{len(planned)} ranks were planned, the shares have {slots} slots.", "")
        )
    for share in shares:
        if len(share.devices) % tensor:
            message = (
                f"the share on {share.node_name} has {len(share.devices)} slots, which is no multiple of "
                f"parallel.tensor={tensor}: a TP group would lie on two nodes."
            )
            raise PlacementError(Problem("parallel.tensor", message, ""))
    placed: list[PlacedRank] = []
    groups = iter(_groups_in_order(planned))
    for node, node_shares in enumerate(_nodes_in_order(shares)):
        for share in node_shares:
            for start in range(0, len(share.devices), tensor):
                for offset, place in enumerate(next(groups)):
                    placed.append(_placed(place, share, node, start + offset))
    return tuple(sorted(placed, key=lambda entry: entry.rank))


def planned_table(placed: Sequence[PlacedRank]) -> tuple[RankPlace, ...]:
    """The table in the form of `RunPlan.ranks`, with real node and device numbers."""
    return tuple(
        RankPlace(p.rank, p.node, p.device, data=p.data, pipeline=p.pipeline, context=p.context, tensor=p.tensor)
        for p in placed
    )


@dataclass(frozen=True, slots=True)
class RankReport:
    """Where a rank says that it is."""

    rank: int
    node_id: str
    device: int | None
    """Device number on the node; None where ranks hold no device of their own (`device: cpu`)."""


def verify_placement(placed: Sequence[PlacedRank], reports: Mapping[int, RankReport]) -> tuple[Problem, ...]:
    """What differs between the table and what the ranks report; empty when the placement is as decided.

    TP groups are checked on the reports alone, so that an error in the table cannot hide one.
    """
    problems: list[Problem] = []
    nodes_of_group: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    held: Counter[tuple[str, int]] = Counter()
    for entry in placed:
        report = reports.get(entry.rank)
        if report is None:
            problems.append(Problem("cluster", f"rank {entry.rank} has not said where it is.", ""))
            continue
        nodes_of_group[(entry.data, entry.pipeline, entry.context)].add(report.node_id)
        if report.node_id != entry.node_id:
            message = f"rank {entry.rank} was placed on {entry.node_name}, but runs on node {report.node_id}."
            problems.append(Problem("cluster", message, ""))
        if report.device is not None:
            held[(report.node_id, report.device)] += 1
            if report.device != entry.device:
                message = f"rank {entry.rank} was given device {entry.device}, but computes on {report.device}."
                problems.append(Problem("cluster", message, ""))
    for (data, pipeline, context), nodes in nodes_of_group.items():
        if len(nodes) > 1:
            message = f"the TP group data={data} pipeline={pipeline} context={context} lies on {len(nodes)} nodes."
            problems.append(Problem("parallel.tensor", message, ""))
    for (node_id, device), ranks in held.items():
        if ranks > 1:
            problems.append(Problem("cluster", f"{ranks} ranks compute on device {device} of node {node_id}.", ""))
    return tuple(problems)


def _groups_in_order(planned: Sequence[RankPlace]) -> list[list[RankPlace]]:
    """TP groups, each by tensor index, in the order of the plan's (node, GPU)."""
    groups: dict[tuple[int, int, int], list[RankPlace]] = defaultdict(list)
    for place in planned:
        groups[(place.pipeline, place.data, place.context)].append(place)
    for group in groups.values():
        group.sort(key=lambda place: place.tensor)
    return sorted(groups.values(), key=lambda group: (group[0].node, min(p.gpu for p in group), group[0].rank))


def _nodes_in_order(shares: Sequence[LocatedShare]) -> list[list[LocatedShare]]:
    """Shares by node: nodes of one domain together, those with most slots first, so that planned nodes stay whole."""
    by_node: dict[str, list[LocatedShare]] = defaultdict(list)
    for share in shares:
        by_node[share.node_id].append(replace(share, devices=tuple(sorted(share.devices))))

    def key(node_shares: list[LocatedShare]) -> tuple[str, int, str, str]:
        first = node_shares[0]
        return (first.domain, -sum(len(share.devices) for share in node_shares), first.node_name, first.node_id)

    return sorted(
        (sorted(group, key=lambda share: (share.devices, share.share)) for group in by_node.values()),
        key=key,
    )


def _placed(place: RankPlace, share: LocatedShare, node: int, local_rank: int) -> PlacedRank:
    return PlacedRank(
        rank=place.rank,
        share=share.share,
        local_rank=local_rank,
        node_id=share.node_id,
        node_name=share.node_name,
        node=node,
        device=share.devices[local_rank],
        data=place.data,
        pipeline=place.pipeline,
        context=place.context,
        tensor=place.tensor,
    )
