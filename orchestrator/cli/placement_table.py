"""The table rank -> node -> device of a running attempt: one line a rank for small worlds, one a node above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

_RANKS_IN_FULL = 16
_NODES_IN_FULL = 16
_FIRST_NODES, _LAST_NODES = 8, 2
"""Nodes shown at both ends of a larger world."""
_AXES = ("pipeline", "data", "context", "tensor")


def placement_lines(table: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The table as aligned lines, a heading first. Entries have rank, node_name, node_id, device and coordinates."""
    if not table:
        return ()
    entries = sorted(table, key=lambda entry: entry["rank"])
    axes = [axis for axis in _AXES if len({entry[axis] for entry in entries}) > 1] or ["data"]
    rows = [("rank", "node", "device", *axes)]
    if len(entries) <= _RANKS_IN_FULL:
        rows += [_row([entry], axes) for entry in entries]
        return _aligned(rows)
    nodes = [list(group) for _, group in groupby(entries, key=lambda entry: entry["node_id"])]
    shown = nodes if len(nodes) <= _NODES_IN_FULL else nodes[:_FIRST_NODES]
    rows += [_row(group, axes) for group in shown]
    if len(nodes) > _NODES_IN_FULL:
        rows.append(("...", f"{len(nodes) - _FIRST_NODES - _LAST_NODES} more", "", *("" for _ in axes)))
        rows += [_row(group, axes) for group in nodes[-_LAST_NODES:]]
    return _aligned(rows)


def _row(entries: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> tuple[str, ...]:
    return (
        _range([entry["rank"] for entry in entries]),
        str(entries[0]["node_name"]),
        _range([entry["device"] for entry in entries]),
        *(_range([entry[axis] for entry in entries]) for axis in axes),
    )


def _range(values: Sequence[int]) -> str:
    """`3`, `0-7`, or `0, 2, 4`."""
    unique = sorted(set(values))
    if len(unique) > 1 and unique == list(range(unique[0], unique[-1] + 1)):
        return f"{unique[0]}-{unique[-1]}"
    return ", ".join(str(value) for value in unique)


def _aligned(rows: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return tuple("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
