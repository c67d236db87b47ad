"""The warm process of a node: imports once, forks ranks in milliseconds. Run as `python -m
orchestrator.launch.warm_main`.

It reads one JSON line from standard input, listens on a Unix socket, imports what ranks need, and forks a *keeper* for
every supervisor that connects. The keeper forks that supervisor's ranks and reports their ends. The chain of lives:
supervisor gone -> keeper kills its ranks and ends; keeper gone -> the kernel kills its ranks (PR_SET_PDEATHSIG);
standard input closed -> the warm process ends. No threads here, because it forks; no ray.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_MESSAGE_BYTES = 65536
"""Most bytes of one command; commands are a few hundred."""


def main() -> None:
    """Listen, import, then fork a keeper for each connection until standard input closes."""
    order = json.loads(sys.stdin.readline())
    # A session of its own: the terminal's Ctrl-C reaches the driver alone, and ranks live until they have saved.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped by the kernel
    sys.path[:] = order["sys_path"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(order["socket"])
        listener.listen(64)
        started = time.time()
        _import(order["preload"])
        warm = {"kind": "warm", "started": started, "ready": time.time()}
        gc.freeze()  # what was imported is never collected, so that its pages stay shared
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.close(0)
                os.open(os.devnull, os.O_RDONLY)
                _set_name("keeper")
                try:
                    _Keeper(connection).run(warm)
                finally:
                    os._exit(0)
            connection.close()


def _import(modules: list[str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            # Only a warm-up: the rank that needs the module meets the same error and reports it with its traceback.
            print(f"not imported beforehand: {name}: {error}", file=sys.stderr)


class _Keeper:
    """Forks the ranks of one supervisor and tells it how they end."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor = supervisor
        self._ranks: dict[int, int] = {}  # pid -> rank
        self._pid = os.getpid()

    def run(self, greeting: dict[str, Any]) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._tell(greeting)
        while True:
            watched: list[Any] = [self._supervisor, wake_read]
            ready, _, _ = select.select(watched, [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._supervisor in ready:
                message, handles, _, _ = socket.recv_fds(self._supervisor, _MESSAGE_BYTES, 1)
                if not message:
                    self._kill(list(self._ranks.values()), signal.SIGKILL)
                    return
                self._obey(json.loads(message), handles)

    def _obey(self, command: dict[str, Any], handles: list[int]) -> None:
        if command["kind"] == "fork":
            rank = command["rank"]
            pid = os.fork()
            if pid == 0:
                self._become_rank(command, handles[0])
            os.close(handles[0])
            self._ranks[pid] = rank
            self._tell({"kind": "forked", "rank": rank, "pid": pid})
        elif command["kind"] == "signal":
            self._kill(command["ranks"], command["number"])

    def _kill(self, ranks: list[int], number: int) -> None:
        for pid, rank in list(self._ranks.items()):
            if rank in ranks:
                os.kill(pid, number)  # not reaped yet, so the pid is still this rank's

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            rank = self._ranks.pop(pid)
            self._tell({"kind": "exited", "rank": rank, "code": os.waitstatus_to_exitcode(status), "time": time.time()})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._supervisor.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # the supervisor is gone; the read side ends the keeper

    def _become_rank(self, command: dict[str, Any], handle: int) -> None:
        """In the forked process; does not return."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)  # the keeper died before the line above took effect
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._supervisor.close()
            _set_name(f"rank {command['rank']}")
            _redirect_output(Path(command["log"]), command["title"])
            from orchestrator.launch.rank_main import run

            code = run(handle)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # gloo and CUDA threads abort now and then while an interpreter is taken down; everything is flushed.
            os._exit(code)


def _set_name(name: str) -> None:
    """What `ps -o pid,comm` and `top` show; at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _redirect_output(log: Path, title: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(handle, number)
    os.close(handle)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(f"---- {title}, process {os.getpid()} ----")


if __name__ == "__main__":
    main()
