"""Runs one function on a few gloo processes of this machine, and ends them all whatever happens.

The processes are forked from one warm server, so that a start costs a fraction of a second; they end with their parent.
The first rank that fails is told first, with its traceback; ranks that say nothing for too long are named and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError, Problem, RunError

PATIENCE_SECONDS = 300.0
"""Longest silence of all ranks together; a step of a toy takes under a second on an idle machine."""
_GRACE_SECONDS = 2.0
"""After the first failure, for others to say what they know."""
_TRACEBACK_LINES = 30
_PR_SET_PDEATHSIG = 1

_CONTEXT = multiprocessing.get_context("forkserver")

Beat = Callable[[str], None]
"""Called by a rank with where it is."""


class RanksFailedError(RunError):
    """A rank raised, died or hung; the problem tells of the first one."""


@dataclass(slots=True)
class _Failure:
    rank: int
    time: float
    message: str
    traceback: str = ""


@dataclass(slots=True)
class _Ranks:
    """The processes of one run, from outside."""

    processes: list[Any] = field(default_factory=list)
    receivers: dict[Connection, int] = field(default_factory=dict)
    doing: dict[int, str] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[_Failure] = field(default_factory=list)


def warm_up() -> None:
    """Begin to import what ranks need, in the server that they will be forked from; returns at once."""
    from multiprocessing import forkserver

    _CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "orchestrator.engine.verify_rank"])
    forkserver.ensure_running()


def run_on_ranks(
    world: int, function: Callable[..., Any], *args: Any, patience_seconds: float = PATIENCE_SECONDS
) -> list[Any]:
    """Results of `function(*args, beat=beat)` by rank, each in a process with a gloo default group of `world`.

    Raises RanksFailedError when a rank raises, dies, or all say nothing for `patience_seconds`; none is left running.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    ranks = _Ranks()
    with tempfile.TemporaryDirectory(prefix="orchestrator-verify-") as folder:
        # The store lives here, so that no rank's end takes it away from another.
        store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        try:
            for rank in range(world):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                log = Path(folder) / f"rank_{rank}.log"
                order = (sender, rank, world, store.port, str(log), patience_seconds, function, args)
                process = _CONTEXT.Process(target=_rank, args=order, daemon=True)
                process.start()
                sender.close()
                ranks.processes.append(process)
                ranks.receivers[receiver] = rank
            _listen(ranks, patience_seconds)
        finally:
            for process in ranks.processes:
                process.kill()
            for process in ranks.processes:
                process.join()
        if ranks.failures:
            raise RanksFailedError(_told(ranks.failures, world, Path(folder)))
    return [ranks.results[rank] for rank in range(world)]


def _listen(ranks: _Ranks, patience_seconds: float) -> None:
    """Until every rank has ended, one has failed (and a moment has passed), or nothing is heard any more."""
    open_ends = set(ranks.receivers)
    deadline = time.monotonic() + patience_seconds
    while open_ends:
        ready = wait(list(open_ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        if not ranks.failures:
            deadline = time.monotonic() + patience_seconds
        for connection in ready:
            assert isinstance(connection, Connection)
            if not _hear(ranks, connection):
                open_ends.discard(connection)
                if len(ranks.failures) == 1:
                    deadline = time.monotonic() + _GRACE_SECONDS
    for connection in open_ends:
        rank = ranks.receivers[connection]
        if rank not in ranks.results and not ranks.failures:
            waiting = ", ".join(
                f"rank {other}: {ranks.doing.get(other, 'starting')}" for other in ranks.receivers.values()
            )
            ranks.failures.append(
                _Failure(rank, time.time(), f"no rank said anything for {patience_seconds:g} s ({waiting})")
            )


def _hear(ranks: _Ranks, connection: Connection) -> bool:
    """Take one message; whether more may come."""
    rank = ranks.receivers[connection]
    try:
        kind, *values = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        if rank not in ranks.results and all(failure.rank != rank for failure in ranks.failures):
            ranks.processes[rank].join(5)
            code = ranks.processes[rank].exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            # Before anything that its end made the others say.
            ranks.failures.append(
                _Failure(rank, 0.0, f"its process died ({how}) while {ranks.doing.get(rank, 'starting')}")
            )
        return False
    if kind == "doing":
        ranks.doing[rank] = values[0]
    elif kind == "result":
        ranks.results[rank] = values[0]
    else:
        ranks.failures.append(_Failure(rank, *values))
    return True


def _told(failures: list[_Failure], world: int, folder: Path) -> Problem:
    """The first failure in words, with its traceback and, for a process that died, the end of what it wrote."""
    first = min(failures, key=lambda failure: failure.time)
    text = first.traceback
    log = folder / f"rank_{first.rank}.log"
    if not text and log.exists():
        text = log.read_text(encoding="utf-8", errors="replace")
    lines = text.rstrip().splitlines()[-_TRACEBACK_LINES:]
    others = sorted({failure.rank for failure in failures} - {first.rank})
    after = (
        f" After it {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} failed." if others else ""
    )
    message = f"Rank {first.rank} of {world}: {first.message}.{after}"
    return Problem("", "\n".join([message, *lines]), "")


def _rank(
    sender: Connection,
    rank: int,
    world: int,
    port: int,
    log: str,
    patience_seconds: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """In the forked process: meet the others, work, say what came of it. Does not return."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the parent's `finally` has to do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.enable()

    def say(*message: Any) -> None:
        # Plain pickle: multiprocessing's own would share a tensor's memory with a process that ends here.
        with contextlib.suppress(BrokenPipeError):
            sender.send_bytes(pickle.dumps(message))

    try:
        _meet(rank, world, port, patience_seconds)
        say("result", function(*args, beat=lambda text: say("doing", text)))
    except BaseException as error:
        ours = isinstance(error, OrchestratorError)
        message = str(error) if ours else "".join(traceback.format_exception_only(error)).strip()
        say("failed", time.time(), message, "" if ours else traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can abort an interpreter that exits normally


def _meet(rank: int, world: int, port: int, patience_seconds: float) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    os.environ.update(_loopback())
    timeout = timedelta(seconds=2 * patience_seconds)  # the parent's patience ends first and names what each rank did
    store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=timeout)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _loopback() -> Mapping[str, str]:
    """Whatever the machine's name resolves to, these ranks talk inside of it."""
    names = {name for _, name in socket.if_nameindex()}
    return (
        {"GLOO_SOCKET_IFNAME": next(name for name in ("lo", "lo0") if name in names)} if names & {"lo", "lo0"} else {}
    )
