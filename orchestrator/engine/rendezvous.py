"""How the ranks of one attempt find each other: a fresh store on a free port of rank 0, a fresh process group.

Nothing is fixed in advance, so several runs, and the attempts of one run, never meet on the same port.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from orchestrator.engine.reach import unreachable
from orchestrator.plan.rank_task import RankLink, RankTask

BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""gloo is always there: the small integer collective of a step and checkpoints talk over the host."""


def meet(task: RankTask, link: RankLink, device: torch.device) -> None:
    """Set up the default process group of all ranks (collective).

    Ranks have `fault_tolerance.start_timeout_seconds` to come here, and `network_timeout_seconds` to connect once all
    are here. A collective that waits longer than `step_timeout_seconds` (at least `start_timeout_seconds`) ends with an
    error, a last resort behind the supervisor's own watch. Raises UnreachableError when they do not connect.
    """
    faults = task.plan.config.fault_tolerance
    collective = timedelta(seconds=max(faults.step_timeout_seconds, faults.start_timeout_seconds))
    connecting = timedelta(seconds=faults.network_timeout_seconds)
    ranks = len(task.plan.ranks)
    store = _store(task, link, ranks, timedelta(seconds=faults.start_timeout_seconds))
    store.set_timeout(connecting)
    try:
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=task.rank,
            world_size=ranks,
            timeout=connecting,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        limit = f"{faults.network_timeout_seconds:g} s"
        raise unreachable(
            f"rank {task.rank} did not connect to all of the {ranks} ranks within {limit}", error
        ) from error
    store.set_timeout(collective)
    _set_pg_timeout(collective, dist.group.WORLD)


def _store(task: RankTask, link: RankLink, ranks: int, patience: timedelta) -> TCPStore:
    """The store on rank 0, once every rank has come to it."""
    if task.rank == 0:
        store = TCPStore("localhost", 0, ranks, is_master=True, timeout=patience, wait_for_workers=False)
        link.rendezvous(store.port)
    else:
        host, port = link.rendezvous(None)
        try:
            store = TCPStore(host, port, ranks, is_master=False, timeout=patience)
        except RuntimeError as error:
            raise unreachable(f"rank {task.rank} did not reach rank 0 at {host}:{port}", error) from error
    if store.add("arrived", 1) == ranks:
        store.set("all arrived", "")
    store.wait(["all arrived"], patience)
    return store


def leave() -> None:
    """Wait until every rank has got this far (collective).

    Rank 0 keeps the store: were it to end while another rank still sets up a group, that rank would fail with
    "connection reset by peer" at the end of a run that went well.
    """
    dist.all_reduce(torch.zeros(1))
