"""Taking turns: contestants of one comparison are alive together and compute one after another, a few steps each.

The driver (`peers.py`) opens a socket; every rank of every contestant stops at its `Gate` before a step and goes on
when it is told how many steps it may take. So what else the machine does falls on all alike within seconds, and
start-up is paid once. Without a driver a gate is open. Imports nothing heavy: rivals use it too.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import IO

ADDRESS = "BENCHMARK_GATE"
"""Variable with the path of the driver's socket."""


class Gate:
    """A rank's side. Ends the process when the driver has had enough."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._allowed = 0
        self._line: IO[str] | None = None
        path = os.environ.get(ADDRESS)
        if path is not None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            self._line = connection.makefile("rw", encoding="utf-8")

    @property
    def driven(self) -> bool:
        """Whether somebody else says when to compute and when to end."""
        return self._line is not None

    def wait(self, loss: float | None = None) -> None:
        """Called before every step; returns when this rank may take it. `loss`: of the step before, if known."""
        if self._line is None:
            return
        if self._allowed == 0:
            arrival = {"rank": self._rank, "time": time.time(), "cpu": time.process_time(), "loss": loss}
            self._line.write(json.dumps(arrival) + "\n")
            self._line.flush()
            self._allowed = int(self._line.readline() or 0)
            if self._allowed == 0:
                os._exit(0)
        self._allowed -= 1
