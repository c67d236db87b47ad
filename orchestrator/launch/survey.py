"""Asks the live cluster what it has, for `inventory` and `cluster=ray`.

Ray's own list of nodes (slots, labels) and one small task a node (driver's names of the GPUs, memory). Raises
`ConfigError`: nothing has been started when this is asked. What the answers mean is `declare.py`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, Problem, RunError
from orchestrator.launch.declare import Declaration, Device, LiveNode, declare
from orchestrator.launch.gpu_kinds import known_entries
from orchestrator.launch.probe import NodeFacts, probe_nodes
from orchestrator.launch.session import cluster_address, ray_session

_KIND_LABEL = "ray.io/accelerator-type"
_KIND_RESOURCE = "accelerator_type:"


def survey() -> tuple[LiveNode, ...]:
    """The living nodes of the cluster at `RAY_ADDRESS`, by name. Raises `ConfigError` when there is none to ask."""
    if cluster_address() is None:
        raise ConfigError(
            Problem(
                "cluster",
                "RAY_ADDRESS is not set (or is `local`), so there is no cluster that could be asked.",
                "Set RAY_ADDRESS=HOST:PORT (`ray status` on the head names it), or declare one (`--help cluster`).",
            )
        )
    try:
        with ray_session(None) as ray:
            entries = [entry for entry in ray.nodes() if entry["Alive"]]
            answers = probe_nodes(ray, [entry["NodeID"] for entry in entries])
    except RunError as error:
        raise ConfigError(error.problems) from error
    nodes = [_node(entry, answers[entry["NodeID"]]) for entry in entries]
    return tuple(sorted(nodes, key=lambda node: (-node.gpus, node.name, node.node_id)))


def live_cluster(device: Device, gpu: str | None, config_directory: Path | None) -> dict[str, Any]:
    """The `cluster` section that describes the live cluster. Raises `ConfigError`."""
    declared = declared_cluster(survey(), device, gpu, config_directory)
    if declared.problems:
        raise ConfigError(declared.problems)
    return declared.body(f"the Ray cluster at {cluster_address()}")


def declared_cluster(
    nodes: tuple[LiveNode, ...], device: Device, gpu: str | None, config_directory: Path | None
) -> Declaration:
    """`nodes` as a declaration, with the entries of `conf/gpu/` and of the user's folder."""
    return declare(nodes, known_entries(config_directory), device, gpu)


def _node(entry: dict[str, Any], facts: NodeFacts | str) -> LiveNode:
    resources, labels = entry["Resources"], entry.get("Labels") or {}
    by_resource = [name.removeprefix(_KIND_RESOURCE) for name in resources if name.startswith(_KIND_RESOURCE)]
    said = facts if isinstance(facts, NodeFacts) else None
    return LiveNode(
        node_id=entry["NodeID"],
        name=entry.get("NodeManagerHostname") or entry["NodeManagerAddress"],
        gpus=int(resources.get("GPU", 0)),
        cpus=int(resources.get("CPU", 0)),
        kind=labels.get(_KIND_LABEL) or next(iter(by_resource), ""),
        products=tuple((gpu.name, gpu.memory_bytes / 2**30) for gpu in said.gpus) if said else (),
        memory_gib=said.memory_bytes / 2**30 if said else None,
        labels=dict(labels),
    )
