"""Whether the ranks reach each other, asked before anything is built: one small all-reduce in every group.

Owns the errors that name the group, its ranks and what to look at. A wrong network interface otherwise shows minutes
later as a hang in the first step. Each check has a time limit of its own (`fault_tolerance.network_timeout_seconds`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from orchestrator.engine.mesh import AXES, Mesh
from orchestrator.errors import Problem, RunError

_POLL_SECONDS = 0.002
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class UnreachableError(RunError):
    """Ranks do not reach each other."""

    failure_kind = "network"


def check_groups(mesh: Mesh, device: torch.device, timeout_seconds: float) -> None:
    """One all-reduce of a number in every group that has more than one rank (collective), on the host and on `device`.

    Raises UnreachableError naming the first group that does not finish in time, or in which it fails.
    """
    for name, group in _groups(mesh):
        ranks = dist.get_process_group_ranks(group)
        for where in dict.fromkeys(("cpu", device.type)):
            _check(name, ranks, group, torch.ones(1, device=device if where == device.type else "cpu"), timeout_seconds)


def unreachable(what: str, error: Exception | None = None) -> UnreachableError:
    """The error for `what` did not work, with this host's interfaces and the variables that choose among them."""
    reason = f": {(str(error).strip() or type(error).__name__).splitlines()[0]}" if error is not None else ""
    chosen = ", ".join(f"{name}={os.environ.get(name) or '(not set)'}" for name in _VARIABLES)
    message = f"{what}{reason}. {socket.gethostname()} has {_interfaces()}; {chosen}."
    fix = (
        "Set GLOO_SOCKET_IFNAME (for CUDA also NCCL_SOCKET_IFNAME) where the command is started to the interface by "
        "which all nodes reach each other, and check that no firewall closes the ports between them."
    )
    return UnreachableError(Problem("fault_tolerance.network_timeout_seconds", message, fix))


def _groups(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    whole = dist.group.WORLD
    if whole is not None and dist.get_world_size() > 1:
        yield "all ranks", whole
    for axis in AXES:
        part = mesh.whole[axis]
        if part.size() > 1:
            yield f"the {axis} group", part.get_group()
    if mesh.gradient.size() > 1:
        yield "the gradient group", mesh.gradient.get_group()


def _check(name: str, ranks: list[int], group: dist.ProcessGroup, value: torch.Tensor, timeout_seconds: float) -> None:
    what = f"an all-reduce over {name} (ranks {', '.join(map(str, ranks))}; {value.device.type})"
    deadline = time.monotonic() + timeout_seconds
    try:
        work = dist.all_reduce(value, group=group, async_op=True)
        assert work is not None
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise unreachable(f"{what} was not done after {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        work.wait(timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise unreachable(f"{what} failed", error) from error
    if value.item() != len(ranks):
        raise unreachable(f"{what} added up to {value.item():g} instead of {len(ranks)}")


def _interfaces() -> str:
    """`eth0 10.0.0.3, lo 127.0.0.1`: interfaces that are up, with their IPv4 addresses."""
    state = psutil.net_if_stats()
    found = [
        f"{name} {address.address}"
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if address.family == socket.AF_INET and name in state and state[name].isup
    ]
    return ", ".join(found) or "no network interface with an IPv4 address"
