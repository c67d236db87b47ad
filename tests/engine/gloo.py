"""Starts gloo ranks for tests: real processes, forked from one warm server, so that a start costs a fraction of a
second.

`on_ranks(world, function, *args)` runs `function(rank, world, *args)` with a default process group in every process and
gives the results by rank. `live(tasks)` runs whole ranks (`run_rank`) with a link that records what they say.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.plan.rank_task import Phase, RankTask

TIMEOUT_SECONDS = 300
"""After this a test's ranks count as hung: many times what they take, for a machine that computes other things too."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "orchestrator.engine.rank", "tests.engine.gloo"])


class RanksFailedError(AssertionError):
    """One or more ranks raised; holds every rank's traceback."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())))


@dataclass
class TestLink:
    """`RankLink` of a test: keeps what the rank says; asks for a stop when a given step begins."""

    __test__ = False

    to_others: tuple[Connection, ...] = ()
    from_first: Connection | None = None
    stop_at_step: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    beats: list[tuple[Phase, int]] = field(default_factory=list)

    def beat(self, phase: Phase, step: int) -> None:
        self.beats.append((phase, step))

    def pace(self, own_seconds: float) -> None:
        return None

    def report(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def stop_requested(self) -> bool:
        return self.stop_at_step is not None and self.beats[-1][1] >= self.stop_at_step

    def rendezvous(self, port: int | None) -> tuple[str, int]:
        if port is not None:
            for connection in self.to_others:
                connection.send(port)
            return "localhost", port
        assert self.from_first is not None
        return "localhost", self.from_first.recv()

    def done(self) -> dict[str, Any]:
        """The `done` event."""
        (event,) = (event for event in self.events if event["kind"] == "done")
        return event


def on_ranks(world: int, function: Callable[..., Any], *args: Any, limit_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Results of `function(rank, world, *args)` by rank, each in a process of its own with a gloo default group."""
    return _start([(_with_group, (function, args))] * world, limit_seconds)


def live(tasks: Sequence[RankTask], stop_at_step: dict[int, int] | None = None) -> list[TestLink]:
    """Run every task as a rank; the links tell what they said. Raises RanksFailedError if any rank raised."""
    asked = stop_at_step or {}
    return _start([(_with_link, (task, asked.get(task.rank))) for task in tasks])


def _with_group(rank: int, world: int, link: TestLink, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("localhost", 0, world, is_master=True, wait_for_workers=False)
        link.rendezvous(store.port)
    else:
        store = dist.TCPStore(*link.rendezvous(None), world, is_master=False)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    return function(rank, world, *args)


def _with_link(rank: int, world: int, link: TestLink, task: RankTask, stop_at_step: int | None) -> TestLink:
    from orchestrator.engine.rank import run_rank

    link.stop_at_step = stop_at_step
    run_rank(task, link)
    return TestLink(events=link.events, beats=link.beats)


def _start(
    work: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], limit_seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    world = len(work)
    ports = [_CONTEXT.Pipe() for _ in range(world - 1)]
    results = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = []
    for rank, (function, args) in enumerate(work):
        to_others = tuple(sender for sender, _ in ports) if rank == 0 else ()
        from_first = None if rank == 0 else ports[rank - 1][1]
        link = TestLink(to_others=to_others, from_first=from_first)
        process = _CONTEXT.Process(
            target=_main, args=(results[rank][1], function, rank, world, link, args), daemon=True
        )
        process.start()
        processes.append(process)
        results[rank][1].close()
    try:
        return _collect([receiver for receiver, _ in results], processes, limit_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(receivers: list[Connection], processes: list[Any], limit_seconds: float) -> list[Any]:
    found: dict[int, Any] = {}
    failures: dict[int, str] = {}
    for rank, receiver in enumerate(receivers):
        if not receiver.poll(limit_seconds if not failures else 10):
            failures[rank] = "did not end in time"
            continue
        try:
            worked, value = pickle.loads(receiver.recv_bytes())
        except EOFError:
            processes[rank].join(5)
            worked, value = False, f"its process died with exit code {processes[rank].exitcode}"
        (found if worked else failures)[rank] = value
    if failures:
        raise RanksFailedError(failures)
    return [found[rank] for rank in range(len(receivers))]


def _main(results: Connection, function: Callable[..., Any], rank: int, world: int, link: TestLink, args: Any) -> None:
    faulthandler.enable()
    try:
        outcome = (True, function(rank, world, link, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would share a tensor's memory with a process that ends here.
    results.send_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
