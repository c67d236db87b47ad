"""The table rank -> node -> GPU: one line a rank for small worlds, one line a node above, and gaps for large ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.table import Table

from orchestrator.plan.run_plan import RankPlace, RunPlan

_RANKS_IN_FULL = 16
"""World size up to which every rank has a line."""
_NODES_IN_FULL = 16
"""Nodes up to which every node has a line."""
_FIRST_NODES, _LAST_NODES = 8, 2
"""Nodes shown at both ends of a larger world."""

_AXES = ("pipeline", "data", "context", "tensor")


def number_ranges(values: Iterable[int]) -> str:
    """`3`, `0-7`, or `0, 2-4`."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def rank_table(plan: RunPlan) -> Table:
    """Where every rank computes and which part of the mesh it is."""
    parallel = plan.parallel
    axes = [axis for axis in _AXES if parallel is None or getattr(parallel, axis) > 1] or ["data"]
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    slot = "GPU" if plan.config.cluster.device == "cuda" else "slot"
    for title in ("node", slot, "rank", *axes):
        table.add_column(title, justify="right", no_wrap=True)
    if len(plan.ranks) <= _RANKS_IN_FULL:
        for place in plan.ranks:
            _add(table, [place], axes)
        return table
    nodes = [list(places) for _, places in groupby(plan.ranks, key=lambda place: place.node)]
    if len(nodes) <= _NODES_IN_FULL:
        for places in nodes:
            _add(table, places, axes)
        return table
    for places in nodes[:_FIRST_NODES]:
        _add(table, places, axes)
    table.add_row("...", "", "", *("" for _ in axes), style="dim")
    for places in nodes[-_LAST_NODES:]:
        _add(table, places, axes)
    return table


def _add(table: Table, places: list[RankPlace], axes: list[str]) -> None:
    table.add_row(
        str(places[0].node),
        number_ranges([place.gpu for place in places]),
        number_ranges([place.rank for place in places]),
        *(number_ranges([getattr(place, axis) for place in places]) for axis in axes),
    )
