"""A live cluster as a `cluster` of the configuration: nodes grouped by what they have, GPUs by their entry. Pure.

Owns what `inventory` writes and what `cluster=ray` means. Refuses, by name and with what to add, GPUs of which no entry
is known; never guesses a network. CPU-only nodes are listed and take no part, unless the CPU is what computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import yaml

from orchestrator.errors import Problem
from orchestrator.launch.gpu_kinds import GpuEntry, Match, by_label, by_product, option_name, template

Device = Literal["cuda", "cpu"]

_ALIKE = 1.05
"""Nodes whose memory differs by less than this factor count as alike; the smallest counts for all."""
DOMAIN_WORDS = ("gpu-domain", "nvlink-domain", "nvlink_domain", "domain", "rack")
"""Last part of a label that names a rack or an NVLink domain, the closest first."""
_OWN_LABELS = ("ray.io/node-id", "ray.io/accelerator-type", "ray.io/node-group")


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A living node as Ray and its own task describe it."""

    node_id: str
    name: str
    gpus: int
    """GPUs that Ray gives out."""
    cpus: int
    """CPU slots that Ray gives out."""
    kind: str = ""
    """Kind of GPU by Ray's label; empty: none is given."""
    products: tuple[tuple[str, float], ...] = ()
    """(name, memory in GiB) of each GPU by its driver; empty where none answered."""
    memory_gib: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As `inventory --json` prints it."""
        return {**asdict(self), "labels": dict(self.labels), "products": [list(product) for product in self.products]}


@dataclass(frozen=True, slots=True)
class Group:
    """Like nodes."""

    node_ids: tuple[str, ...]
    slots: int
    gpu: str
    """Entry of `conf/gpu/`; `cpu` where the CPU computes."""
    memory_gib: int | None
    cores: int | None


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is to be said of a cluster."""

    device: Device
    groups: tuple[Group, ...]
    domain_label: str | None
    """Label that names racks or NVLink domains, where it is not Ray's own."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    """Choices that were made and that the user should know of."""

    def body(self, name: str) -> dict[str, Any]:
        """The `cluster` section; names of GPUs stand for their entries."""
        values: dict[str, Any] = {"name": name, "device": self.device}
        if len(self.groups) == 1:
            values |= _fields(self.groups[0], self.device)
        else:
            fields = [_fields(group, self.device) for group in self.groups]
            values |= {"gpu": fields[0]["gpu"], "node_groups": fields}  # the groups' own are what counts
        if self.domain_label is not None:
            values["domain_label"] = self.domain_label
        return values


def declare(
    nodes: Sequence[LiveNode], entries: Sequence[GpuEntry], device: Device = "cuda", gpu: str | None = None
) -> Declaration:
    """Declare the nodes of a cluster. `gpu` is the entry to take where a node does not say which one it has.

    With `problems` the groups are those that could be named.
    """
    slotted = [node for node in nodes if (node.gpus if device == "cuda" else node.cpus) > 0]
    if not slotted:
        return Declaration(device, (), None, (_none_has_any(nodes, device),), ())
    named: list[tuple[LiveNode, str]] = []
    unknown: dict[str, list[LiveNode]] = {}
    notes: dict[str, None] = {}
    for node in slotted:
        match = Match("cpu") if device == "cpu" else _recognise(node, entries, gpu)
        if match.option is None:
            unknown.setdefault(_said(node), []).append(node)
            continue
        named.append((node, match.option))
        if match.others:
            notes[_chosen(node, match)] = None
    problems = tuple(_unknown(said, found, entries) for said, found in unknown.items())
    return Declaration(device, _grouped(named, device), _domain_label(slotted), problems, tuple(notes))


def document(declaration: Declaration, name: str, origin: str, day: str) -> str:
    """The YAML file `cluster/NAME.yaml`; `origin` is the cluster's address."""
    slots = "GPUs" if declaration.device == "cuda" else "CPU slots"
    count = sum(len(group.node_ids) * group.slots for group in declaration.groups)
    nodes = sum(len(group.node_ids) for group in declaration.groups)
    lines = [f"# {nodes} node{'s' if nodes > 1 else ''} with {count} {slots} of the Ray cluster at {origin} on {day}."]
    lines += [f"# {note}" for note in declaration.notes]
    if nodes > 1:
        lines.append("# Ray does not know the network: give network_gbps_per_gpu, and the plan counts its time.")
    text = yaml.safe_dump(declaration.body(name), sort_keys=False, allow_unicode=True)
    return "\n".join([*lines, text])


def _recognise(node: LiveNode, entries: Sequence[GpuEntry], gpu: str | None) -> Match:
    if node.products:
        matches = {by_product(product, memory, entries) for product, memory in node.products}
        if len(matches) == 1 and (match := matches.pop()).option is not None:
            return match
    match = by_label(node.kind, entries) if node.kind else Match(None)
    if gpu is not None and (match.option is None or gpu in match.others):
        return Match(gpu)
    return Match(None) if node.products else match  # the driver knows better than the label


def _said(node: LiveNode) -> str:
    if node.products:
        return " + ".join(dict.fromkeys(f"{name} ({memory:.1f} GiB)" for name, memory in node.products))
    return node.kind


def _chosen(node: LiveNode, match: Match) -> str:
    return (
        f"Ray's label {node.kind} fits several entries: {match.option} is taken; the others are "
        f"{', '.join(match.others)} (choose with gpu=NAME)."
    )


def _unknown(said: str, nodes: Sequence[LiveNode], entries: Sequence[GpuEntry]) -> Problem:
    where = ", ".join(node.name for node in nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    known = ", ".join(entry.option for entry in entries)
    if not said:
        message = f"{where}: neither the driver nor Ray's label ray.io/accelerator-type says which GPUs these are."
        return Problem("gpu", message, f"Say it with gpu=NAME, one of: {known}; or label the nodes when Ray starts.")
    product, memory = nodes[0].products[0] if nodes[0].products else (nodes[0].kind, None)
    option = option_name(product)
    return Problem(
        "gpu",
        f"{where}: {said} is no GPU of conf/gpu/.",
        f"If it is one of {known}, say gpu=NAME. Otherwise write MY_CONF/gpu/{option}.yaml as below and give "
        f"--config-dir MY_CONF:\n{template(option, product, memory)}",
    )


def _none_has_any(nodes: Sequence[LiveNode], device: Device) -> Problem:
    if device == "cpu":
        return Problem("cluster", "no node of this cluster gives out CPU slots.", "Start nodes with --num-cpus.")
    who = "the only living node" if len(nodes) == 1 else f"none of the {len(nodes)} living nodes"
    gives = "gives out no GPU" if len(nodes) == 1 else "gives out a GPU"
    return Problem(
        "cluster",
        f"{who} of this cluster {gives}.",
        "Where there are GPUs, start Ray with the driver in sight or with --num-gpus=N. To train on the CPUs: "
        "cluster.device=cpu (inventory: --device cpu).",
    )


def _grouped(named: Sequence[tuple[LiveNode, str]], device: Device) -> tuple[Group, ...]:
    alike: dict[tuple[str, int, int], list[LiveNode]] = {}
    for node, option in named:
        slots = node.gpus if device == "cuda" else node.cpus
        alike.setdefault((option, slots, node.cpus), []).append(node)
    groups = []
    for (option, slots, cpus), nodes in alike.items():
        for part in _by_memory(nodes):
            memory = part[0].memory_gib
            ids = tuple(sorted(node.node_id for node in part))
            groups.append(Group(ids, slots, option, None if memory is None else math.floor(memory), cpus or None))
    return tuple(
        sorted(groups, key=lambda group: (-group.slots * len(group.node_ids), group.gpu, -(group.memory_gib or 0)))
    )


def _by_memory(nodes: Sequence[LiveNode]) -> list[list[LiveNode]]:
    """Nodes of about the same memory together, the one with the least first."""
    parts: list[list[LiveNode]] = []
    for node in sorted(nodes, key=lambda node: node.memory_gib or 0.0):
        first = parts[-1][0].memory_gib if parts else None
        if parts and (node.memory_gib or 0.0) <= (first or 0.0) * _ALIKE:
            parts[-1].append(node)
        else:
            parts.append([node])
    return parts


def _fields(group: Group, device: Device) -> dict[str, Any]:
    gpu: Any = group.gpu
    if device == "cpu":
        share = math.floor((group.memory_gib or 1) / group.slots * 10) / 10
        gpu = {"name": "CPU", "memory_gib": max(share, 0.1), "source": "the node's memory, shared by its slots"}
    fields = {"nodes": len(group.node_ids), "gpus_per_node": group.slots, "gpu": gpu}
    optional = {"host_memory_gib": group.memory_gib, "cores_per_node": group.cores}
    return fields | {key: value for key, value in optional.items() if value is not None}


def _domain_label(nodes: Sequence[LiveNode]) -> str | None:
    keys = {key for node in nodes for key in node.labels if key not in _OWN_LABELS}
    for word in DOMAIN_WORDS:
        for key in sorted(keys):
            if key.rpartition("/")[2] == word:
                return None if key == "ray.io/gpu-domain" else key  # Ray's own is what counts anyway
    return None


def domain_of(node: LiveNode, label: str | None) -> str:
    """The rack or NVLink domain of a node; empty when it has none."""
    return node.labels.get(label or "ray.io/gpu-domain", "")
