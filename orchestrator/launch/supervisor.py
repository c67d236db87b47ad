"""What runs inside a Ray Train worker: the supervisor of one node share. It holds the share's ranks, not the model.

It connects to the driver, has a keeper fork the ranks, forwards their events and heartbeats, and carries out commands:
`start` a generation of ranks, tell them the `rendezvous`, `stop` at the next step, `kill`, `finish`. It decides
nothing. When its driver is gone it ends its ranks and returns; when it dies its keeper ends them. Imports neither
torch nor ray at the top, so that its worker starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from orchestrator.launch.board import Board
from orchestrator.launch.rank_main import RankOrder
from orchestrator.launch.warm import KeeperLink, WarmProcess, preload_of
from orchestrator.plan.rank_task import RankTask

_TICK_SECONDS = 0.2
"""How often heartbeats are read; they go to the driver when something changed, and every second anyway."""
_KEEPER_TIMEOUT_SECONDS = 60.0
_EXISTING_TIMEOUT_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.3
"""Time that a hung rank has for writing its stack into its log before it is killed."""


@dataclass(frozen=True, slots=True)
class SupervisorOrder:
    """What a supervisor is given when Ray Train starts it; the same for all of them."""

    address: tuple[str, int]
    """Where the driver listens."""
    key: bytes
    """Secret of the run, for both sides of the connection."""
    attempt: int
    engine: str
    preload: tuple[str, ...]
    logs_directory: str
    device: str
    """`cuda` or `cpu`."""
    slots: int
    """Slots of the share."""
    warm_sockets: dict[str, str] = field(default_factory=dict)
    """Node id -> socket of a warm process that already runs there."""
    preemption_file: str | None = None
    """File whose appearance says that this node is about to be taken away."""


def supervise(order: SupervisorOrder) -> None:
    """Body of a Ray Train worker: until the driver says `finish` or is gone."""
    facts = _facts(order)
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(Client(order.address, authkey=order.key))
        keeper = _keeper(order, facts["node_id"], stack)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orchestrator-share-")))
        driver.send({"kind": "hello", **facts})
        try:
            _Share(order, driver, keeper, directory / "board").run()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return  # the driver is gone: leaving the block ends the ranks


def _keeper(order: SupervisorOrder, node_id: str, stack: contextlib.ExitStack) -> KeeperLink:
    """A keeper of the node's warm process, or of one that is started for this share where there is none, or no
    longer."""
    existing = order.warm_sockets.get(node_id)
    if existing is not None:
        try:
            keeper = KeeperLink(existing, timeout_seconds=_EXISTING_TIMEOUT_SECONDS)
        except RuntimeError:
            print(f"no warm process answers at {existing}: starting one", file=sys.stderr)
        else:
            stack.callback(keeper.close)
            return keeper
    process = WarmProcess(preload_of(order.engine, order.preload))
    stack.callback(process.close)
    keeper = KeeperLink(process.socket_path, timeout_seconds=_KEEPER_TIMEOUT_SECONDS, process=process)
    stack.callback(keeper.close)
    return keeper


def _facts(order: SupervisorOrder) -> dict[str, Any]:
    """Where this share lies, as its own process sees it."""
    import ray
    import ray.train
    from ray.util import get_current_placement_group, get_node_ip_address

    context = ray.get_runtime_context()
    share = ray.train.get_context().get_world_rank()
    group = get_current_placement_group()
    held = context.get_accelerator_ids().get("GPU", []) if order.device == "cuda" else []
    numbered = sorted(zip(device_numbers(held), held, strict=True))
    return {
        "share": share,
        "node_id": context.get_node_id(),
        "host": get_node_ip_address(),  # type: ignore[no-untyped-call]
        "name": socket.gethostname(),
        "devices": [number for number, _ in numbered],
        "visible": ",".join(name for _, name in numbered),
        "cores": len(os.sched_getaffinity(0)),
        "pid": os.getpid(),
        "placement_group": None if group is None else group.id.hex(),
    }


def device_numbers(names: list[str]) -> list[int]:
    """Device numbers on this node of GPUs as Ray names them: numbers, or UUIDs where `CUDA_VISIBLE_DEVICES` has
    them."""
    if all(name.isdigit() for name in names):
        return [int(name) for name in names]
    import pynvml

    pynvml.nvmlInit()
    try:
        return [int(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(name))) for name in names]
    finally:
        pynvml.nvmlShutdown()


@dataclass(slots=True)
class _Rank:
    task: RankTask
    connection: Connection
    pid: int = 0
    open: bool = True
    """False once it has closed its end; its exit follows from the keeper."""
    seen: tuple[Any, ...] = ()


class _Share:
    """The loop of a supervisor."""

    def __init__(self, order: SupervisorOrder, driver: Any, keeper: KeeperLink, board_path: Path) -> None:
        self._order = order
        self._driver = driver
        self._keeper = keeper
        self._board_path = board_path
        self._board = Board(board_path, order.slots, create=True)
        self._generation = 0
        self._ranks: dict[int, _Rank] = {}
        self._clearing = False
        self._kill_at: float | None = None
        """When ranks that were asked for their stack are killed."""
        self._told = 0.0
        self._noticed = False
        self._memory_kills = memory_kills()

    def run(self) -> None:
        while True:
            handles: list[Any] = [
                self._driver,
                self._keeper,
                *(rank.connection for rank in self._ranks.values() if rank.open),
            ]
            for ready in wait(handles, timeout=_TICK_SECONDS):
                handle: Any = ready
                if handle is self._driver:
                    command = self._driver.recv()
                    if command["kind"] == "finish":
                        for rank in self._ranks.values():
                            self._drain(rank)  # what they have done counts, however they end
                        return
                    self._obey(command)
                elif handle is self._keeper:
                    self._hear_keeper()
                else:
                    self._hear_rank(handle)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_now()
            self._forward_beats()
            self._look_for_notice()

    # -- commands ---------------------------------------------------------------------------------------------------

    def _obey(self, command: dict[str, Any]) -> None:
        if command["kind"] == "start":
            self._start(command["generation"], command["tasks"])
        elif command["generation"] != self._generation:
            return  # meant for ranks that are gone
        elif command["kind"] == "rendezvous":
            for rank in self._ranks.values():
                with contextlib.suppress(OSError):
                    rank.connection.send((command["host"], command["port"]))
        elif command["kind"] == "stop":
            self._board.ask_to_stop()
        elif command["kind"] == "kill":
            self._kill(ask_where=command["ask_where"])

    def _start(self, generation: int, tasks: list[RankTask]) -> None:
        self._generation = generation
        self._clearing, self._kill_at = False, None
        self._memory_kills = memory_kills()
        self._board.clear()
        for task in tasks:
            ours, theirs = socket.socketpair()
            log = str(Path(self._order.logs_directory) / f"rank-{task.rank:03d}.log")
            title = f"attempt {task.attempt}, rank {task.rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
            self._keeper.fork(task.rank, theirs.fileno(), log, title)
            theirs.close()
            connection = Connection(ours.detach())
            connection.send(RankOrder(task, self._order.engine, str(self._board_path)))
            self._ranks[task.rank] = _Rank(task, connection)

    def _kill(self, *, ask_where: list[int]) -> None:
        self._clearing = True
        if ask_where and self._ranks:
            # All of them: what the others wait for says as much as where the silent one is.
            self._keeper.signal(list(self._ranks), signal.SIGUSR1)
            self._kill_at = time.monotonic() + _LAST_WORDS_SECONDS
        else:
            self._kill_now()

    def _kill_now(self) -> None:
        self._kill_at = None
        self._keeper.signal(list(self._ranks), signal.SIGKILL)
        self._tell_when_clear()

    # -- what is heard ----------------------------------------------------------------------------------------------

    def _hear_keeper(self) -> None:
        message = self._keeper.receive()
        if message is None:
            raise RuntimeError("the keeper of the ranks was killed")
        if message["kind"] == "forked":
            if message["rank"] in self._ranks:
                self._ranks[message["rank"]].pid = message["pid"]
        elif message["kind"] == "exited":
            rank = self._ranks[message["rank"]]
            self._drain(rank)
            rank.connection.close()
            phase, step, _ = self._board.read(rank.task.local_rank)
            del self._ranks[message["rank"]]
            kills = memory_kills()
            seen = {"phase": phase, "step": step, "out_of_memory": kills > self._memory_kills}
            self._driver.send({**message, "generation": self._generation, **seen})
            self._tell_when_clear()
        else:
            self._driver.send(message)

    def _hear_rank(self, connection: Any) -> None:
        for rank in self._ranks.values():
            if rank.connection is connection:
                rank.open = self._drain(rank)
                return

    def _drain(self, rank: _Rank) -> bool:
        """Forward all that a rank has sent; False when it has closed its end."""
        try:
            while rank.connection.poll():
                event = rank.connection.recv()
                if event["kind"] == "error":
                    phase, step, _ = self._board.read(rank.task.local_rank)
                    event |= {"phase": phase, "step": step}
                self._driver.send(
                    {"kind": "event", "generation": self._generation, "rank": rank.task.rank, "event": event}
                )
        except (EOFError, ConnectionResetError):
            return False
        return True

    def _tell_when_clear(self) -> None:
        if self._clearing and not self._ranks:
            self._clearing = False
            self._driver.send({"kind": "cleared", "generation": self._generation})

    def _forward_beats(self) -> None:
        if not self._ranks:
            return
        beats: dict[int, tuple[str, int, float, bool]] = {}
        changed = False
        for rank in self._ranks.values():
            phase, step, age = self._board.read(rank.task.local_rank)
            beats[rank.task.rank] = (phase, step, age, age > 1.0 and _stopped(rank.pid))
            changed = changed or rank.seen != (phase, step)
            rank.seen = (phase, step)
        now = time.monotonic()
        if changed or now - self._told > 1.0:
            self._told = now
            paces = {rank.task.rank: self._board.read_pace(rank.task.local_rank) for rank in self._ranks.values()}
            self._driver.send({"kind": "beats", "generation": self._generation, "beats": beats, "paces": paces})

    def _look_for_notice(self) -> None:
        file = self._order.preemption_file
        if file is not None and not self._noticed and Path(file).exists():
            self._noticed = True
            self._driver.send({"kind": "notice", "reason": f"{file} has appeared"})


def memory_kills() -> int:
    """Processes that the kernel has killed for lack of memory: in this control group if that can be read, else at all.

    cgroup v2 counts them in `memory.events`, v1 in `memory.oom_control`, the whole machine in `/proc/vmstat`.
    """
    group = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), "").lstrip("/")
    root = Path("/sys/fs/cgroup")
    for file in (root / group / "memory.events", root / "memory/memory.oom_control", Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines() if " " in line)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def _stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP or a debugger (state T or t in /proc)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")
