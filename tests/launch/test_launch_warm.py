"""The warm process and its keepers: ranks forked in milliseconds, and a chain of lives that leaves nobody behind."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from orchestrator.launch.board import Board
from orchestrator.launch.rank_main import RankOrder
from orchestrator.launch.warm import KeeperLink, WarmProcess
from orchestrator.plan.rank_task import RankTask
from tests.launch.plans import cpu_plan

WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcess]:
    process = WarmProcess(["orchestrator.launch.rank_main", "no_such_module"])
    yield process
    process.close()


@pytest.fixture
def keeper(warm: WarmProcess) -> Iterator[KeeperLink]:
    link = KeeperLink(warm.socket_path, timeout_seconds=WAIT_SECONDS, process=warm)
    assert link.receive()["kind"] == "warm"
    yield link
    link.close()


def fork(keeper: KeeperLink, directory: Path, engine: str) -> tuple[Connection, int]:
    Board(directory / "board", 1, create=True).clear()
    ours, theirs = socket.socketpair()
    keeper.fork(0, theirs.fileno(), str(directory / "logs" / "rank-000.log"), "a title")
    theirs.close()
    connection = Connection(ours.detach())
    task = RankTask(cpu_plan(slots=1), 0, 0, 1, str(directory), 1, 1, 0.0, {"TOY_STEPS": "1", "PASSED_ON": "yes"})
    connection.send(RankOrder(task, engine, str(directory / "board")))
    forked = keeper.receive()
    assert forked["kind"] == "forked"
    return connection, forked["pid"]


def events(connection: Connection) -> list[dict]:
    found = []
    try:
        while connection.poll(WAIT_SECONDS):
            found.append(connection.recv())
    except (EOFError, ConnectionResetError):
        return found
    raise AssertionError(f"the rank did not end; so far {found}")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_rank_runs_the_engine_by_name_and_says_how_it_went(keeper, tmp_path):
    connection, pid = fork(keeper, tmp_path, "tests.launch.engines:environment")
    assert [event["kind"] for event in events(connection)] == ["done"]
    exited = keeper.receive()
    assert (exited["kind"], exited["code"], exited["rank"]) == ("exited", 0, 0)
    log = (tmp_path / "logs" / "rank-000.log").read_text()
    assert f"---- a title, process {pid} ----" in log
    assert "PASSED_ON=yes OMP_NUM_THREADS=1" in log
    assert "to the error stream" in log


def test_an_exception_becomes_an_event_with_class_and_traceback(keeper, tmp_path):
    connection, _ = fork(keeper, tmp_path, "tests.launch.engines:mistake")
    (event,) = events(connection)
    assert (event["kind"], event["class"], event["message"]) == ("error", "user", "ValueError: seven is too many")
    assert "in mistake" in event["traceback"]
    assert keeper.receive()["code"] == 1


def test_an_engine_that_cannot_be_imported_is_reported_too(keeper, tmp_path):
    connection, _ = fork(keeper, tmp_path, "no_such_module:run")
    (event,) = events(connection)
    assert (event["class"], event["message"]) == ("user", "ModuleNotFoundError: No module named 'no_such_module'")


def test_a_rank_that_hangs_writes_where_it_is_into_its_log_when_asked(keeper, tmp_path):
    fork(keeper, tmp_path, "tests.launch.engines:forever")
    log = tmp_path / "logs" / "rank-000.log"
    wait_for(lambda: log.exists() and "waits for ever" in log.read_text())
    keeper.signal([0], signal.SIGUSR1)
    wait_for(lambda: "in forever" in log.read_text())


def test_ranks_end_with_their_supervisor(warm, tmp_path):
    keeper = KeeperLink(warm.socket_path, timeout_seconds=WAIT_SECONDS, process=warm)
    keeper.receive()
    _, pid = fork(keeper, tmp_path, "tests.launch.engines:forever")
    keeper.close()
    wait_for(lambda: gone(pid))


def test_ranks_end_with_their_keeper(keeper, tmp_path):
    _, pid = fork(keeper, tmp_path, "tests.launch.engines:forever")
    log = tmp_path / "logs" / "rank-000.log"
    wait_for(lambda: log.exists() and "waits for ever" in log.read_text())
    assert Path(f"/proc/{pid}/comm").read_text() == "rank 0\n"
    os.kill(psutil.Process(pid).ppid(), 9)
    wait_for(lambda: gone(pid))


def test_a_warm_process_that_cannot_start_says_why(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)  # longer than the path of a socket may be
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    process = WarmProcess([])
    with pytest.raises(RuntimeError, match=r"(?s)ended at its start: .*AF_UNIX path too long"):
        KeeperLink(process.socket_path, timeout_seconds=WAIT_SECONDS, process=process)
    process.close()
