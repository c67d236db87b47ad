"""What a forked rank does: set itself up, call the engine by name, report how it went. No ray; torch only in the
engine.

`Link` is the rank's side of `RankLink`. The rank has no thread of its own for any of this: beats go to shared memory,
events into a socket pair, and its end is the kernel's business (see `warm_main.py`).
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.launch.board import Board
from orchestrator.launch.report import classify
from orchestrator.plan.rank_task import Phase, RankTask

_TRACEBACK_CHARACTERS = 20_000
"""End of a traceback that is sent to the driver; the log has all of it."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """First message of a supervisor to a rank."""

    task: RankTask
    engine: str
    board_path: str


class Link:
    """`RankLink` over a board and a connection."""

    def __init__(self, connection: Connection, board: Board, local_rank: int) -> None:
        self._connection = connection
        self._board = board
        self._local_rank = local_rank
        self._last_phase: Phase = "starting"
        self._stepping = False

    def beat(self, phase: Phase, step: int) -> None:
        """See `RankLink.beat`. Until the first step, a change of phase is also an event, so that the start can be
        timed."""
        self._board.beat(self._local_rank, phase, step)
        if not self._stepping and phase != self._last_phase:
            self._last_phase = phase
            self._stepping = phase == "stepping"
            self.report({"kind": "phase", "phase": phase})

    def pace(self, own_seconds: float) -> None:
        """See `RankLink.pace`."""
        self._board.pace(self._local_rank, own_seconds)

    def report(self, event: dict[str, Any]) -> None:
        """See `RankLink.report`."""
        self._connection.send({"time": time.time(), **event})

    def stop_requested(self) -> bool:
        """See `RankLink.stop_requested`."""
        return self._board.stop_asked()

    def rendezvous(self, port: int | None) -> tuple[str, int]:
        """See `RankLink.rendezvous`."""
        if port is not None:
            self._connection.send({"kind": "rendezvous", "port": port})
        host, agreed = self._connection.recv()
        return host, agreed


def run(handle: int) -> int:
    """Live one rank's life over the socket `handle`; its exit code comes back."""
    connection = Connection(handle)
    order: RankOrder = connection.recv()
    task = order.task
    board = Board(Path(order.board_path), task.local_ranks)
    link = Link(connection, board, task.local_rank)
    os.environ.update(task.environment)
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    # Ctrl-C goes to the driver, which asks for a stop at a step boundary.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks a hung rank where it is
    try:
        module, _, function = order.engine.partition(":")
        getattr(importlib.import_module(module), function)(task, link)
    except BaseException as error:
        # Everything is reported, SystemExit included: a rank that ends early takes the others with it.
        traceback.print_exc()
        sys.stderr.flush()
        _report_error(link, error)
        return 1
    return 0


def _report_error(link: Link, error: BaseException) -> None:
    # An error of ours is written for the user already; any other is told with its class.
    ours = isinstance(error, OrchestratorError)
    message = str(error) if ours else "".join(traceback.format_exception_only(error)).strip()
    text = traceback.format_exc()[-_TRACEBACK_CHARACTERS:]
    try:
        found = {"class": classify(error), "message": message, "traceback": text}
        link.report({"kind": "error", **found, "evidence": getattr(error, "evidence", None)})
    except OSError:
        return  # the supervisor is gone, and with it everyone who could be told
