"""What the live cluster has and what of it is free, as `placement` values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from orchestrator.launch.answers import silent_nodes
from orchestrator.placement.topology import Node

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives each node; a share is pinned to its node with it."""
_KIND_LABEL = "ray.io/accelerator-type"
DOMAIN_LABEL = "ray.io/gpu-domain"
"""Label of a node's NVLink domain, unless `cluster.domain_label` names another."""


def read_nodes(ray: Any, device: str, domain_label: str = DOMAIN_LABEL) -> tuple[Node, ...]:
    """All living nodes with slots of `device` (`cuda`: resource GPU, `cpu`: resource CPU); nodes without are left
    out. Those that Ray is draining are marked as leaving."""
    # Public Ray tells what is free in the whole cluster, not on which node.
    from ray._private.state import available_resources_per_node

    leaving = draining_nodes()
    resource = resource_of(device)
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    nodes: list[Node] = []
    for entry in ray.nodes():
        total = int(entry["Resources"].get(resource, 0))
        if not entry["Alive"] or not total:
            continue
        labels = entry.get("Labels") or {}
        nodes.append(
            Node(
                node_id=entry["NodeID"],
                name=entry.get("NodeManagerHostname") or entry["NodeManagerAddress"],
                slots_total=total,
                slots_free=int(free.get(entry["NodeID"], {}).get(resource, 0)),
                kind=labels.get(_KIND_LABEL, ""),
                domain=labels.get(domain_label, ""),
                labels=dict(labels),
                leaving=entry["NodeID"] in leaving,
            )
        )
    return tuple(nodes)


def nodes_now(
    ray: Any, device: str, domain_label: str, leaving: Collection[str], doubted: Collection[str]
) -> tuple[Node, ...]:
    """As `read_nodes`; `leaving` are known to go, `doubted` are asked whether they are still there."""
    nodes = read_nodes(ray, device, domain_label)
    silent = silent_nodes(_addresses(ray, {node.node_id for node in nodes} & set(doubted)))
    return tuple(
        replace(node, leaving=node.leaving or node.node_id in leaving, silent=node.node_id in silent) for node in nodes
    )


def _addresses(ray: Any, node_ids: Collection[str]) -> dict[str, str]:
    """Node -> HOST:PORT of its own Ray process."""
    found = {}
    for entry in ray.nodes():
        if entry["NodeID"] in node_ids:
            host = entry["NodeManagerAddress"]
            found[entry["NodeID"]] = f"{f'[{host}]' if ':' in host else host}:{entry['NodeManagerPort']}"
    return found


def draining_nodes() -> dict[str, float | None]:
    """Nodes that Ray has been told to drain -> `time.time()` at which they go; None: no deadline was given.

    A preemption notice of a cloud, an autoscaler's and `ray drain-node` all arrive here.
    """
    # Ray Train alone has a public call for this, and only inside its workers, as a barrier of all of them.
    from ray._private.state import state

    found: dict[str, int] = state.get_draining_nodes()
    return {node_id: moment / 1000 if moment else None for node_id, moment in found.items()}


def bundle_nodes(placement_group: str) -> list[str]:
    """Node of every bundle of a placement group, by Ray's own table. `placement_group` is its id."""
    from ray.util import placement_group_table

    table = placement_group_table()
    found: dict[int, str] = table.get(placement_group, {}).get("bundles_to_node_id", {})
    return [found[bundle] for bundle in sorted(found)]


def living_nodes(ray: Any) -> set[str]:
    """Ids of the nodes that Ray holds for alive."""
    return {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}


def resource_of(device: str) -> str:
    """Ray's name for one slot of `device`."""
    return "GPU" if device == "cuda" else "CPU"
