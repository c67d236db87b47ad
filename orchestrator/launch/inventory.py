"""What the live cluster has and what of it is free, as `placement` values."""

from __future__ import annotations

from typing import Any

from orchestrator.placement.topology import Node

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives each node; a share is pinned to its node with it."""
_KIND_LABEL = "ray.io/accelerator-type"
_DOMAIN_LABEL = "ray.io/gpu-domain"


def read_nodes(ray: Any, device: str) -> tuple[Node, ...]:
    """All living nodes with slots of `device` (`cuda`: resource GPU, `cpu`: resource CPU)."""
    # Public Ray tells what is free in the whole cluster, not on which node.
    from ray._private.state import available_resources_per_node

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
                domain=labels.get(_DOMAIN_LABEL, ""),
            )
        )
    return tuple(nodes)


def resource_of(device: str) -> str:
    """Ray's name for one slot of `device`."""
    return "GPU" if device == "cuda" else "CPU"
