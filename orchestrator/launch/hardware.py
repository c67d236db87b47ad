"""Whether the hardware that a plan needs is here at all, asked within about a second and before anything starts.

Without `RAY_ADDRESS` the machine itself is asked: NVML for GPUs, no Ray. With it the cluster is asked. What is busy now
is no problem here: placement waits for it (`waiting.py`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import PlacementError, Problem, RunError
from orchestrator.launch.inventory import read_nodes
from orchestrator.launch.node_check import check_nodes, held_gpus
from orchestrator.launch.probe import GpuUse, own_facts
from orchestrator.launch.session import cluster_address, ray_session
from orchestrator.placement.shares import choose_shares, usable_nodes
from orchestrator.placement.topology import Node, need_of
from orchestrator.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, as its driver reports it."""

    name: str
    memory_bytes: int
    uuid: str = ""


def check_hardware(plan: RunPlan, warn: Callable[[str], None] = lambda _: None) -> tuple[Problem, ...]:
    """What the plan needs and is not there; empty when all is. Starts nothing. `warn` hears of what does not prevent
    it."""
    if cluster_address() is not None:
        # A cluster is not asked about a plan that it will not get.
        return _check_cluster(plan, warn) if plan.feasible else ()
    if plan.parallel is None:
        return _check_any(plan)
    if plan.config.cluster.device == "cpu":
        return _check_processes(plan)
    gpus = local_gpus()
    return check_gpus(plan, gpus) or (() if isinstance(gpus, str) else _check_held(plan, gpus, own_facts().gpus, warn))


def _check_any(plan: RunPlan) -> tuple[Problem, ...]:
    """Whether there is a GPU at all: how many a plan needs that could not be made is not known, but none is too few."""
    if plan.config.cluster.device == "cpu":
        return ()
    gpus = local_gpus()
    if gpus and not isinstance(gpus, str):
        return ()
    here = f"this machine has {f'none: {gpus}' if isinstance(gpus, str) else _inventory(gpus)}"
    message = f"{plan.config.cluster.gpu.name} GPUs needed; {here}, and RAY_ADDRESS names no cluster."
    return (Problem("cluster", message, _remedy(plan)),)


def local_gpus() -> tuple[Gpu, ...] | str:
    """The GPUs of this machine that `CUDA_VISIBLE_DEVICES` leaves; or, in words, why none can be seen."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVIDIA driver answers ({error})"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = tuple(
            Gpu(
                name=str(pynvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
            )
            for handle in handles
        )
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver does not list its GPUs ({error})"
    finally:
        pynvml.nvmlShutdown()
    return visible_gpus(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """Those of `gpus` that CUDA shows with `CUDA_VISIBLE_DEVICES` set to `setting` (None: not set)."""
    if setting is None:
        return gpus
    # Entries may be numbers or UUIDs; an entry that is neither hides itself and all after it, as CUDA does.
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if named:
            chosen.append(named[0])
        elif entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        else:
            break
    return tuple(chosen)


def check_gpus(plan: RunPlan, gpus: tuple[Gpu, ...] | str) -> tuple[Problem, ...]:
    """Whether the GPUs of this machine hold the plan; `gpus` as `local_gpus` answers."""
    here = "this machine has none: " + gpus if isinstance(gpus, str) else f"this machine has {_inventory(gpus)}"
    count = 0 if isinstance(gpus, str) else len(gpus)
    assert plan.parallel is not None
    if count < plan.parallel.world_size or _nodes_needed(plan) > 1:
        return (Problem("cluster", f"{_needed(plan)}; {here}, and RAY_ADDRESS names no cluster.", _remedy(plan)),)
    smallest = min(gpu.memory_bytes for gpu in gpus if not isinstance(gpu, str))
    capacity = plan.memory.capacity_bytes if plan.memory else 0
    if smallest < capacity:
        message = (
            f"the plan counts on {capacity / 2**30:.1f} GiB a GPU (cluster.gpu={plan.config.cluster.gpu.name}), "
            f"the GPUs here have {smallest / 2**30:.1f}."
        )
        return (Problem("cluster.gpu", message, "Choose the entry of conf/gpu/ that describes these GPUs."),)
    return ()


def _check_held(
    plan: RunPlan, visible: Sequence[Gpu], uses: Sequence[GpuUse], warn: Callable[[str], None]
) -> tuple[Problem, ...]:
    """GPUs of this machine that others hold. Ray gives out whichever it likes, so one that is held is in the way."""
    seen = {gpu.uuid for gpu in visible}
    mine = [use for use in uses if use.uuid in seen]
    said = held_gpus(socket.gethostname(), len(mine), mine, (plan.memory and plan.memory.peak_bytes) or 0)
    if isinstance(said, Problem):
        return (replace(said, fix="End these processes, or leave their GPUs out with CUDA_VISIBLE_DEVICES."),)
    if said:
        warn(said)
    return ()


def _check_processes(plan: RunPlan) -> tuple[Problem, ...]:
    nodes = _nodes_needed(plan)
    if nodes <= 1:
        return ()
    slots = need_of(plan).slots_per_node
    message = (
        f"{plan.parallel.world_size if plan.parallel else 0} CPU processes on {nodes} nodes of {slots} are needed "
        "(cluster.nodes, cluster.gpus_per_node); this is one machine, and RAY_ADDRESS names no cluster."
    )
    fix = (
        "Set RAY_ADDRESS to a Ray cluster with these nodes, or take cluster=local with cluster.gpus_per_node processes."
    )
    return (Problem("cluster.nodes", message, fix),)


def _check_cluster(plan: RunPlan, warn: Callable[[str], None]) -> tuple[Problem, ...]:
    try:
        with ray_session(plan) as ray:
            cluster = plan.config.cluster
            nodes = read_nodes(ray, cluster.device, cluster.domain_label)
            refusal = _cannot_hold(plan, nodes)
            if refusal is not None:
                return (refusal,)
            problems, warnings = check_nodes(ray, plan, usable_nodes(nodes, need_of(plan)))
    except RunError as error:
        return error.problems
    for warning in warnings:
        warn(warning)
    return tuple(problems)


def _cannot_hold(plan: RunPlan, nodes: Sequence[Node]) -> Problem | None:
    # Judged as if all were free: what others hold now may be free in a minute.
    idle = [replace(node, slots_free=node.slots_total) for node in nodes]
    try:
        choose_shares(idle, need_of(plan))
    except PlacementError as error:
        refusal = error.problems[0]
        where = f"the Ray cluster at RAY_ADDRESS={cluster_address()}"
        return Problem("cluster", f"{where}: {_needed(plan)}; {refusal.message}", f"{refusal.fix} {_remedy(plan)}")
    return None


def _nodes_needed(plan: RunPlan) -> int:
    return max((place.node for place in plan.ranks), default=0) + 1


def _needed(plan: RunPlan) -> str:
    need = need_of(plan)
    if plan.config.cluster.device == "cpu":
        return f"{need.world_size} CPU slots needed"
    nodes = _nodes_needed(plan)
    spread = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{need.world_size} x {plan.config.cluster.gpu.name} needed{spread}"


def _inventory(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "no GPU that CUDA_VISIBLE_DEVICES leaves visible"
    kinds: dict[str, int] = {}
    for gpu in gpus:
        label = f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)"
        kinds[label] = kinds.get(label, 0) + 1
    return ", ".join(f"{count} x {label}" for label, count in kinds.items())


def _remedy(plan: RunPlan) -> str:
    command = f"python -m orchestrator plan +experiment={plan.config.run.experiment}"
    return f"Run it on a Ray cluster that has them (RAY_ADDRESS). To see the plan without them: {command}"
