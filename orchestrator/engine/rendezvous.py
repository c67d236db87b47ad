"""How the ranks of one attempt find each other: a fresh store on a free port of rank 0, a fresh process group.

Nothing is fixed in advance, so several runs, and the attempts of one run, never meet on the same port.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from orchestrator.plan.rank_task import RankLink, RankTask

BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""gloo is always there: the small integer collective of a step and checkpoints talk over the host."""


def meet(task: RankTask, link: RankLink, device: torch.device) -> None:
    """Set up the default process group of all ranks (collective).

    A collective that waits longer than `fault_tolerance.step_timeout_seconds` (at least `start_timeout_seconds`) ends
    with an error, a last resort behind the supervisor's own watch.
    """
    faults = task.plan.config.fault_tolerance
    timeout = timedelta(seconds=max(faults.step_timeout_seconds, faults.start_timeout_seconds))
    ranks = len(task.plan.ranks)
    if task.rank == 0:
        store = TCPStore("localhost", 0, ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        link.rendezvous(store.port)
    else:
        host, port = link.rendezvous(None)
        store = TCPStore(host, port, ranks, is_master=False, timeout=timeout)
    dist.init_process_group(
        BACKENDS[device.type],
        store=store,
        rank=task.rank,
        world_size=ranks,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def leave() -> None:
    """Wait until every rank has got this far (collective).

    Rank 0 keeps the store: were it to end while another rank still sets up a group, that rank would fail with
    "connection reset by peer" at the end of a run that went well.
    """
    dist.all_reduce(torch.zeros(1))
