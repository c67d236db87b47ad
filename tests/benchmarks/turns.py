"""The driver's side of taking turns: starts the ranks of one contestant and lets them compute a number of steps.

See `gate.py` for the ranks' side. Ranks are started directly with the variables that torchrun sets, which saves an
agent process a contestant; rank 0's store listens on a free port of the loopback.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.benchmarks.gate import ADDRESS

START_SECONDS = 300
"""Until all ranks are at their first step; DeepSpeed may compile."""
TURN_SECONDS = 300


@dataclass(frozen=True)
class Turn:
    """What one turn of one contestant came to."""

    seconds: float
    """From the driver's word to the arrival of the last rank at the next step."""
    cpu_seconds: float
    """Processor time of all its ranks, all threads."""
    load_before: float
    loss: float | None
    """Of the last step but one of the turn, where the rank tells it."""


class Driver:
    """Ranks of one contestant. A context: ends them on leaving."""

    def __init__(self, command: Sequence[str], ranks: int, environment: Mapping[str, str], folder: Path) -> None:
        """`command` is one rank's; `folder` is empty and keeps its log."""
        self._command, self._ranks, self._folder = list(command), ranks, folder
        self._environment = {**os.environ, **environment}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[IO[str]] = []
        self._cpu: list[float] = []

    def __enter__(self) -> Driver:
        path = self._folder / "gate"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(self._ranks)
        listener.settimeout(1.0)
        port = free_port()
        with (self._folder / "log").open("wb") as log:
            for rank in range(self._ranks):
                own = {
                    **self._environment, ADDRESS: str(path), "RANK": str(rank), "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": str(self._ranks), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                }  # fmt: skip
                self._processes.append(subprocess.Popen(self._command, env=own, stdout=log, stderr=log))
        try:
            self._accept(listener)
            self._arrivals()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_SECONDS
        while len(self._lines) < self._ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                    raise self._failure("not all ranks came to their first step") from None
                continue
            connection.settimeout(max(TURN_SECONDS, START_SECONDS))
            self._lines.append(connection.makefile("rw", encoding="utf-8"))

    def turn(self, steps: int) -> Turn:
        """Let all ranks take `steps` steps; returns once all stand before the next one. Raises RuntimeError with the
        end of their log when they fail."""
        load, before, started = os.getloadavg()[0], sum(self._cpu), time.time()
        for line in self._lines:
            line.write(f"{steps}\n")
            line.flush()
        arrivals = self._arrivals()
        ended = max(arrival["time"] for arrival in arrivals)
        losses = [arrival["loss"] for arrival in arrivals if arrival["rank"] == 0]
        return Turn(ended - started, sum(self._cpu) - before, load, losses[0])

    def _arrivals(self) -> list[dict[str, Any]]:
        arrivals = []
        for line in self._lines:
            text = line.readline()
            if not text:
                raise self._failure("a rank ended")
            arrivals.append(json.loads(text))
        self._cpu = [arrival["cpu"] for arrival in arrivals]
        return arrivals

    def _failure(self, what: str) -> RuntimeError:
        log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
        return RuntimeError(f"{what}: {' '.join(self._command)}\n{log[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines:
            try:
                line.write("0\n")
                line.close()
            except OSError:
                continue
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
