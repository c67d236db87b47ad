"""Starts a node's warm process and speaks with it; `warm_main.py` is the process itself.

The driver starts one beside `ray.init`, so that importing torch and starting Ray overlap; a supervisor on another node
starts its own. A supervisor connects with `KeeperLink`, which forks ranks, signals them and learns how they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MESSAGE_BYTES = 65536


def preload_of(engine: str, modules: Sequence[str]) -> tuple[str, ...]:
    """All that the ranks of `engine` (`module:function`) need, in order of import."""
    return ("orchestrator.launch.rank_main", *modules, engine.partition(":")[0])


class WarmProcess:
    """A warm process that this process started and ends."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="orchestrator-warm-"))
        self.socket_path = str(self._directory / "socket")
        self.log_path = self._directory / "log"
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.launch.warm_main"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        order = {"socket": self.socket_path, "preload": list(preload), "sys_path": sys.path}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `failure` tells what it died of
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End it; its keepers end with their supervisors."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def failure(self) -> str | None:
        """What it said when it ended by itself; None while it lives."""
        if self._process.poll() is None:
            return None
        return self.log_path.read_text(errors="replace")[-2000:]


class KeeperLink:
    """A supervisor's line to the keeper of its ranks."""

    def __init__(self, socket_path: str, *, timeout_seconds: float, process: WarmProcess | None = None) -> None:
        self._socket = _connect(socket_path, timeout_seconds, process)

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`."""
        return self._socket.fileno()

    def fork(self, rank: int, handle: int, log: str, title: str) -> None:
        """Fork a rank that speaks through `handle` (one end of a socket pair, sent along) and writes to `log`."""
        command = {"kind": "fork", "rank": rank, "log": log, "title": title}
        socket.send_fds(self._socket, [json.dumps(command).encode()], [handle])

    def signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to those of the ranks that still live."""
        self._socket.send(json.dumps({"kind": "signal", "ranks": list(ranks), "number": int(number)}).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next message (`warm`, `forked`, `exited`); None when the keeper is gone."""
        try:
            message = self._socket.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            return None
        return json.loads(message) if message else None

    def close(self) -> None:
        """Let go; the keeper kills what still runs and ends."""
        self._socket.close()


def _connect(path: str, timeout_seconds: float, process: WarmProcess | None) -> socket.socket:
    deadline = time.monotonic() + timeout_seconds
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            said = process.failure() if process else None
            if said is not None:
                raise RuntimeError(f"the process that forks the ranks ended at its start: {said}") from error
            if time.monotonic() > deadline:
                raise RuntimeError(f"no process that forks the ranks answers at {path}: {error}") from error
            time.sleep(0.02)  # it binds its socket before it imports anything: some tens of milliseconds
