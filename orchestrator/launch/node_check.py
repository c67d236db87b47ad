"""Whether the nodes of a cluster are fit for a run: what they said (`probe.py`) judged against the driver and the plan.

`judge` is pure. Named are nodes that do not answer, lack this package or have other code of it, run other versions, do
not see the run's folder or its data, and GPUs that processes unknown to Ray hold. Like findings of several nodes are
one problem. Next: `hardware.py`, which asks before anything starts.
"""

from __future__ import annotations

import contextlib
import glob
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.urls import is_url
from orchestrator.data.tokenizers import BYTES
from orchestrator.errors import Problem
from orchestrator.launch.probe import GpuUse, NodeFacts, own_facts, probe_nodes
from orchestrator.placement.topology import Node
from orchestrator.plan.run_plan import RunPlan

_NAMED_NODES = 4
"""Nodes that a message names; more are counted."""
_SAME_WITH_DRIVER = ("python", "ray", "torch")
"""Compared without what follows a `+`: a driver without GPUs may have another build."""
_SAME_AMONG_NODES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_SEND_IT = "or send it along with the run: python -m orchestrator submit"
_LEAVE_OUT = "or keep the run off these nodes with cluster.require_labels"


@dataclass(frozen=True, slots=True)
class Driver:
    """What nodes are compared with."""

    versions: Mapping[str, str]
    codes: Collection[str]
    """Fingerprints of this package's source that count as the same."""
    paths: Mapping[str, str]
    """Path -> the configuration key that needs it on every node."""
    fresh: Mapping[str, str]
    """File that the driver has just written -> the key of the folder above it."""
    gpu_bytes: int | None
    """Memory that the plan takes on its fullest GPU; None: no GPUs are used."""


def check_nodes(ray: Any, plan: RunPlan, nodes: Sequence[Node]) -> tuple[list[Problem], list[str]]:
    """Ask `nodes` and judge what they say: (problems, warnings). Writes, for seconds, an empty file into the folder of
    the run, or above it."""
    config, ours = plan.config, own_facts()
    peak = plan.memory.peak_bytes if plan.memory and config.cluster.device == "cuda" else None
    with contextlib.ExitStack() as stack:
        fresh: dict[str, str] = {}
        for key, folder in written_folders(config).items():
            with contextlib.suppress(OSError):  # a folder that cannot be written to has a problem of its own
                path = stack.enter_context(_fresh_file(folder))
                fresh[str(path)] = key
        paths = read_paths(config)
        answers = probe_nodes(ray, [node.node_id for node in nodes], paths, fresh)
    # Whoever edits the source meanwhile shall not be told that the nodes have other code.
    codes = {ours.code, own_facts().code}
    return judge(nodes, answers, Driver(ours.versions, codes, paths, fresh, peak))


def written_folders(config: RunConfig) -> dict[str, Path]:
    """Key -> the nearest existing folder at or above what it names, for keys below which all nodes write; object stores
    left out."""
    named = {"run.directory": config.run.directory, "checkpoint.directory": config.checkpoint.directory}
    return {key: _existing(Path(place)) for key, place in named.items() if place is not None and "://" not in place}


def read_paths(config: RunConfig) -> dict[str, str]:
    """Path -> key, for what every node reads; of a pattern the folder above it, object stores left out."""
    data, checkpoint = config.data, config.checkpoint
    named = {
        "data.path": data.path if data.source == "text" else None,
        "data.tokenizer": data.tokenizer if data.source != "synthetic" and data.tokenizer != BYTES else None,
        "checkpoint.resume": checkpoint.resume if checkpoint.resume not in ("auto", "never") else None,
        "checkpoint.init_from": checkpoint.init_from,
    }
    return {str(_without_pattern(Path(place))): key for key, place in named.items() if place and not is_url(place)}


def _without_pattern(path: Path) -> Path:
    while glob.has_magic(str(path)):
        path = path.parent
    return path


def _existing(path: Path) -> Path:
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


@contextlib.contextmanager
def _fresh_file(folder: Path) -> Iterator[Path]:
    path = folder / f".orchestrator-{uuid.uuid4().hex}"
    path.touch(exist_ok=False)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def judge(
    nodes: Sequence[Node], answers: Mapping[str, NodeFacts | str], driver: Driver
) -> tuple[list[Problem], list[str]]:
    """(what makes the run impossible, what is worth a warning), worst first."""
    problems = _silent(nodes, answers)
    answered = [(node, facts) for node in nodes if isinstance(facts := answers.get(node.node_id), NodeFacts)]
    problems += _code(answered, driver)
    problems += _versions(answered, driver)
    problems += _paths(answered, driver)
    held, warnings = _held(answered, driver)
    return problems + held, warnings


Answered = Sequence[tuple[Node, NodeFacts]]


def _silent(nodes: Sequence[Node], answers: Mapping[str, NodeFacts | str]) -> list[Problem]:
    groups: dict[str, list[str]] = {}
    for node in nodes:
        reason = answers.get(node.node_id, "it was not asked")
        if isinstance(reason, str):
            groups.setdefault(reason, []).append(node.name)
    return [
        Problem(
            "cluster", f"{_named(names)} cannot run a task: {reason}.", "Look at Ray's logs there, " + _LEAVE_OUT + "."
        )
        for reason, names in groups.items()
    ]


def _code(answered: Answered, driver: Driver) -> list[Problem]:
    missing: dict[str, list[str]] = {}
    other: dict[str, list[str]] = {}
    for node, facts in answered:
        if not facts.code:
            missing.setdefault(facts.code_place, []).append(node.name)
        elif facts.code not in driver.codes:
            other.setdefault(facts.code_place, []).append(node.name)
    problems = [
        Problem("cluster", f"this package is missing on {_named(names)}: {reason}.", f"Install it there, {_SEND_IT}")
        for reason, names in missing.items()
    ]
    return problems + [
        Problem(
            "cluster",
            f"{_named(names)} would run other code of this package than this command: what lies in {place} differs.",
            f"Bring them to one version (a shared folder or one image), {_SEND_IT}",
        )
        for place, names in other.items()
    ]


def _versions(answered: Answered, driver: Driver) -> list[Problem]:
    problems = []
    for name in _SAME_WITH_DRIVER:
        ours = _public(driver.versions.get(name))
        differing = _by_version(answered, name, lambda version: _public(version) != ours)  # noqa: B023 - used at once
        problems += [_differs(name, version, names, f"{ours} here") for version, names in differing.items()]
    for name in _SAME_AMONG_NODES:
        found = _by_version(answered, name, lambda _: True)
        if len({_public(version) for version in found}) > 1 and name in _SAME_WITH_DRIVER:
            continue  # said above
        if len(found) > 1:
            (most, _), *rest = sorted(found.items(), key=lambda item: -len(item[1]))
            problems += [_differs(name, version, names, f"{most} on the others") for version, names in rest]
    return problems


def _by_version(answered: Answered, name: str, counts: Callable[[str], bool]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node, facts in answered:
        version = facts.versions.get(name, "not installed")
        if counts(version):
            found.setdefault(version, []).append(node.name)
    return found


def _differs(name: str, version: str, names: Sequence[str], other: str) -> Problem:
    return Problem(
        "cluster",
        f"versions differ: {name} is {version} on {_named(names)} and {other}.",
        "Use one environment on all of them: the same image, or `pip install -c infra/constraints.txt`.",
    )


def _public(version: str | None) -> str:
    return (version or "not installed").partition("+")[0]


def _paths(answered: Answered, driver: Driver) -> list[Problem]:
    problems = []
    for path, key in {**driver.fresh, **driver.paths}.items():
        blind = [node.name for node, facts in answered if not facts.sees.get(path, False)]
        if not blind:
            continue
        if path in driver.fresh:
            what = f"what is written to {Path(path).parent} here is not seen on {_named(blind)}: they do not share it"
            fix = f"Give {key} a folder that every node mounts at the same path (infra/README.md says how)."
        else:
            what = f"{path} does not exist on {_named(blind)}"
            fix = "Put it on storage that every node mounts at the same path, or copy it there."
        problems.append(Problem(key, f"{what}.", fix))
    return problems


def _held(answered: Answered, driver: Driver) -> tuple[list[Problem], list[str]]:
    problems: list[Problem] = []
    warnings: list[str] = []
    if driver.gpu_bytes is not None:
        for node, facts in answered:
            said = held_gpus(node.name, node.slots_free, facts.gpus, driver.gpu_bytes)
            (problems if isinstance(said, Problem) else warnings).append(said)  # type: ignore[arg-type]
    return problems, [warning for warning in warnings if warning]


def held_gpus(name: str, free: int, gpus: Sequence[GpuUse], needed_bytes: int) -> Problem | str:
    """What to say of GPUs that processes unknown to Ray hold: a problem, a warning, or nothing.

    `free` is the number of GPUs that Ray would give out, `needed_bytes` what the plan takes of each.
    """
    full = [gpu for gpu in gpus if gpu.memory_bytes - gpu.used_bytes < needed_bytes]
    busy = [gpu for gpu in gpus if gpu.holders or gpu in full]
    if not gpus or free <= len(gpus) - len(busy):
        return ""  # Ray counts those as taken: its own jobs hold them
    text = f"node {name}: Ray counts {free} GPUs as free, but {_holders(busy)}"
    if free <= len(gpus) - len(full):
        return f"{text}. The plan fits beside them, at the price of speed."
    fix = "End these processes, or keep these GPUs from Ray (CUDA_VISIBLE_DEVICES when its node starts)"
    return Problem("cluster", f"{text}.", f"{fix}, {_LEAVE_OUT}.")


def _holders(gpus: Iterable[GpuUse]) -> str:
    parts = []
    for gpu in gpus:
        who = ", ".join(f"{name} (process {pid}, {size / 2**30:.1f} GiB)" for pid, name, size in gpu.holders)
        parts.append(f"GPU {gpu.index} has {gpu.used_bytes / 2**30:.1f} GiB in use" + (f" by {who}" if who else ""))
    return "; ".join(parts)


def _named(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_NAMED_NODES])
    if len(names) == 1:
        return f"node {listed}"
    more = len(names) - _NAMED_NODES
    return f"{len(names)} nodes ({listed}" + (f" and {more} more)" if more > 0 else ")")
