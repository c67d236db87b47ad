"""A torch-free stand-in for the engine: ranks meet over a socket, keep step by a barrier, and fail when told to.

What it shall do comes in `TOY_*` variables of the task's environment. Its "checkpoint" is a file in the run's directory
with the last step, so that restarts can be told apart from fresh starts.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

from orchestrator.plan.rank_task import RankLink, RankTask


class _Barrier:
    """All ranks wait for each other at rank 0; one that dies breaks it for all, as gloo would."""

    def __init__(self, task: RankTask, link: RankLink) -> None:
        ranks = len(task.plan.ranks)
        if task.rank == 0:
            listener = socket.create_server(("127.0.0.1", 0))
            link.rendezvous(listener.getsockname()[1])
            self._peers = [listener.accept()[0] for _ in range(ranks - 1)]
        else:
            host, port = link.rendezvous(None)
            self._peers = [socket.create_connection((host, port))]
        self._root = task.rank == 0

    def wait(self, flag: bool) -> bool:
        """Meet; whether any rank raised its flag."""
        if self._root:
            flags = [flag, *(self._read(peer) for peer in self._peers)]
            for peer in self._peers:
                peer.sendall(b"1" if any(flags) else b"0")
            return any(flags)
        self._peers[0].sendall(b"1" if flag else b"0")
        return self._read(self._peers[0])

    @staticmethod
    def _read(peer: socket.socket) -> bool:
        byte = peer.recv(1)
        if not byte:
            raise RuntimeError("Connection closed by peer [127.0.0.1]")
        return byte == b"1"


def run(task: RankTask, link: RankLink) -> None:
    """Count to `TOY_STEPS`; `TOY_ACT_1=die:3:2` has rank 3 die at step 2 of attempt 1."""
    environment = task.environment
    steps = int(environment.get("TOY_STEPS", "3"))
    saved = Path(task.run_directory) / "saved"
    link.beat("rendezvous", 0)
    barrier = _Barrier(task, link)
    # With pretended GPUs the toy says which of those that its supervisor holds it would take.
    device = f"cuda:{task.local_rank}" if task.plan.config.cluster.device == "cuda" else "cpu"
    link.report(
        {"kind": "ready", "rank": task.rank, "host": socket.gethostname(), "pid": os.getpid(), "device": device}
    )
    link.beat("loading", 0)
    first = int(saved.read_text()) + 1 if saved.exists() else 1
    print(f"rank {task.rank} starts at step {first}")
    status = "finished"
    step = first
    for step in range(first, steps + 1):
        link.beat("stepping", step)
        _act(task, step)
        if barrier.wait(link.stop_requested()):
            status = "stopped"
        time.sleep(float(environment.get("TOY_STEP_SECONDS", "0")))
        if task.rank == 0:
            saved.write_text(str(step))
            link.report({"kind": "step", "step": step, "loss": 1.0 / step})
            link.report({"kind": "checkpoint", "step": step, "path": str(saved)})
        barrier.wait(False)
        if status == "stopped":
            break
    link.beat("finishing", step)
    network = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))}
    result = {"steps": step, "attempt": task.attempt, "threads": task.threads, "network": network}
    link.report({"kind": "done", "rank": task.rank, "status": status, "step": step, "result": result})


def _act(task: RankTask, step: int) -> None:
    act, _, where = task.environment.get(f"TOY_ACT_{task.attempt}", "").partition(":")
    if where != f"{task.rank}:{step}":
        return
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif act == "hang":
        threading.Event().wait()
    elif act == "user_error":
        raise ValueError("the sequence is longer than the model can take")
    elif act == "crash":
        raise RuntimeError("an unlucky day")
