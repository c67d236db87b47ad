"""What each node of the cluster says of itself: versions, our code, memory, GPUs and who holds them, what it sees of a
few paths.

One small Ray task a node, taking no slot; what runs there is `on_node.py`, sent by value. `node_check.py` judges the
answers before a training, `declare.py` makes a configuration of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.launch import on_node
from orchestrator.launch.inventory import NODE_LABEL

PACKAGES = ("orchestrator", "ray", "torch", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Distributions whose versions must be the same wherever a run has ranks."""
PROBE_SECONDS = 60.0
"""How long nodes may take to answer; a worker's start included."""
_UNSEEN_SECONDS = 3.0
"""How long a node looks for a file that was just written: network file systems show it a little later."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU of a node as its driver reports it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    holders: tuple[tuple[int, str, int], ...] = ()
    """(process id, its name, bytes of the GPU) of each process that computes on it."""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node said."""

    versions: Mapping[str, str]
    """Distribution -> version; `python` and `orchestrator` among them. What is not installed is not there."""
    code: str
    """Fingerprint of this package's source files; empty: it cannot be imported there."""
    code_place: str
    """Where it was found, or why it was not."""
    memory_bytes: int
    """Memory of the host, or of the container."""
    cores: int
    gpus: tuple[GpuUse, ...]
    sees: Mapping[str, bool]
    """Path -> whether it exists there."""


def probe_nodes(
    ray: Any, node_ids: Iterable[str], paths: Iterable[str] = (), fresh: Iterable[str] = ()
) -> dict[str, NodeFacts | str]:
    """Node id -> its facts, or in words why it gave none.

    `paths` are looked for on every node; `fresh` ones, which were written a moment ago, for a few seconds.
    """
    ray.cloudpickle.register_pickle_by_value(on_node)  # also for nodes that lack this package
    task = ray.remote(num_cpus=0, max_retries=0)(on_node.answer)
    known, new = tuple(paths), tuple(fresh)
    asked = {
        task.options(label_selector={NODE_LABEL: node_id}).remote(PACKAGES, known, new, _UNSEEN_SECONDS): node_id
        for node_id in node_ids
    }
    answers: dict[str, NodeFacts | str] = {}
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_SECONDS) if asked else ([], [])
    for reference in ready:
        try:
            answers[asked[reference]] = _facts(ray.get(reference))
        except Exception as error:  # whatever a foreign environment raises is what there is to say about the node
            answers[asked[reference]] = _reason(error)
    for reference in late:
        ray.cancel(reference, force=True)
        answers[asked[reference]] = f"no answer within {PROBE_SECONDS:g} s"
    return answers


def own_facts() -> NodeFacts:
    """The same of this process, to compare with."""
    return _facts(on_node.answer(PACKAGES, (), (), 0.0))


def _facts(said: dict[str, Any]) -> NodeFacts:
    gpus = tuple(GpuUse(**{**gpu, "holders": tuple(map(tuple, gpu["holders"]))}) for gpu in said.pop("gpus"))
    return NodeFacts(gpus=gpus, **said)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
