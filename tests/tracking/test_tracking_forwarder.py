"""The forwarder as a process: beside training, never in its way; outages, sudden ends, and sending later.

One real MLflow server on the loopback serves all tests here; one of them stops and starts it again.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.tracking import forward
from orchestrator.tracking.forward import set_priority, start_forwarder
from orchestrator.tracking.forwarding import STARTING_PRIORITY
from orchestrator.tracking.ledger import Ledger, read_ledger
from orchestrator.tracking.run_directory import RunDirectory
from tests.tracking.runs import end, new_run, once, only_run, points, record, rewind, runs_of, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


class Server:
    """A real `mlflow server` that can be stopped and started again on the same port and database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return at once; `wait` until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}", "--workers", "1"]
        files = ["--artifacts-destination", str(self.folder / "files")]
        with (self.folder / "server.log").open("ab") as log:
            # Without its job runners, which double the time of a start and are not asked for anything here.
            environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            self._process = subprocess.Popen(
                [*command, *store, *files], cwd=self.folder, env=environment, stdout=log, stderr=log
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        wait_until(self._answers, f"the MLflow server answers (see {self.folder / 'server.log'})")

    def stop(self) -> None:
        """End it and everything it has started, at once."""
        assert self._process is not None
        family = [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]
        for process in family:
            process.kill()
        psutil.wait_procs(family)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "server.db")
    running = Server(folder)
    running.start()
    yield running
    running.stop()


def sent_steps(run: RunDirectory) -> int:
    ledger = read_ledger(run.path)
    return 0 if ledger is None else ledger.last_step


def trouble_of(run: RunDirectory) -> str | None:
    ledger = read_ledger(run.path)
    return None if ledger is None else ledger.error


def send_later(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.tracking.forward", str(folder), *settings]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_whole_run_is_carried_over_without_a_word_on_the_console(
    tmp_path: Path, uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path, uri)
    forwarder = start_forwarder(run.path, nice=0)
    record(run, [1, 2, 3])
    end(run)
    result = forwarder.finish()
    assert result.complete, result.message
    assert result.run_id == only_run(uri).info.run_id
    assert json.loads(run.summary.read_text())["mlflow_run_id"] == result.run_id
    assert f"mlflow ui --backend-store-uri {uri}" in result.message
    assert points(uri) == once([1, 2, 3])
    assert capfd.readouterr() == ("", "")


def test_the_default_is_a_database_in_the_current_folder(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path)
    forwarder = start_forwarder(run.path, nice=0)
    forwarder.kill()
    ledger = read_ledger(run.path)
    assert ledger is not None
    assert ledger.uri == uri == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_forwarder_gets_ready_at_a_low_priority_and_goes_on_at_the_lowest(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'new.db'}"
    run = new_run(tmp_path, uri)
    forwarder = start_forwarder(run.path)
    process = psutil.Process(forwarder.pid)
    wait_until(lambda: process.nice() == STARTING_PRIORITY, "the forwarder has set its priority")
    wait_until((tmp_path / "new.db").exists, "it has made the database")
    assert runs_of(uri) == []
    record(run, [1])
    wait_until(lambda: process.nice() == 19, "after its first send it has the lowest")
    assert sent_steps(run) == 1
    session = Path(f"/proc/{forwarder.pid}/autogroup")
    if session.exists():
        wait_until(lambda: session.read_text().split()[-1] == "19", "its session has that priority too")
        set_priority(forwarder.pid, 0)
        assert session.read_text().split()[-1] == "0", "at the end it can be hurried by anyone"
    forwarder.kill()


def test_it_ends_with_the_command_that_started_it_and_sends_what_there_is(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path, uri)
    record(run, [1, 2])
    command = subprocess.Popen(
        [sys.executable, "-c", _START_AND_WAIT, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert command.stdout is not None
    forwarder = psutil.Process(int(command.stdout.readline()))
    command.kill()
    command.communicate()
    wait_until(lambda: has_ended(forwarder), "the forwarder of a killed command has ended")
    ledger = read_ledger(run.path)
    assert ledger is not None
    assert not ledger.complete
    if ledger.run_id is not None:
        assert points(uri) == once(range(1, ledger.last_step + 1))


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only its exit code is still to be read by whoever has adopted it."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


_START_AND_WAIT = """
import sys
from orchestrator.tracking.forward import set_priority, start_forwarder
print(start_forwarder(sys.argv[1], nice=0).pid, flush=True)
sys.stdin.read()
"""


def test_an_outage_and_a_killed_forwarder_lose_nothing_and_double_nothing(tmp_path: Path, server: Server) -> None:
    server.wait()
    run = new_run(tmp_path, server.uri)
    forwarder = start_forwarder(run.path, nice=0)
    record(run, range(1, 11))
    wait_until(lambda: sent_steps(run) == 10, "the first ten steps have arrived")
    server.stop()
    record(run, range(11, 19))
    rewind(run, 8)
    record(run, range(9, 21), attempt=2)
    wait_until(lambda: trouble_of(run) is not None, "the outage is noticed")
    forwarder.kill()
    server.start()
    forwarder = start_forwarder(run.path, nice=0)
    record(run, range(21, 26), attempt=2)
    end(run, attempts=2)
    server.wait()
    result = forwarder.finish()
    assert result.complete, result.message
    assert points(server.uri) == once(range(1, 26))
    found = only_run(server.uri)
    assert found.info.status == "FINISHED"
    assert found.data.tags["orchestrator.restarts"] == "1"


def test_without_a_server_the_end_comes_in_time_and_says_how_to_send_later(
    tmp_path: Path, uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        run = new_run(tmp_path, f"http://127.0.0.1:{nobody_listens.getsockname()[1]}")
        forwarder = start_forwarder(run.path, nice=0)
        record(run, [1, 2, 3])
        end(run)
        wait_until(lambda: trouble_of(run) is not None, "the outage is noticed")
        result = forwarder.finish(timeout=0.5)
    assert not result.complete
    assert f"python -m orchestrator.tracking.forward {run.path}" in result.message
    assert runs_of(uri) == []
    # The server is back: here, the same ledger pointed at a store that works.
    ledger = json.loads((run.path / "tracking.json").read_text())
    (run.path / "tracking.json").write_text(json.dumps({**ledger, "uri": uri}))
    sent = send_later(run.path)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout == f"mlflow ui --backend-store-uri {uri}\n"
    assert sent.stderr == ""
    assert points(uri) == once([1, 2, 3])


def test_a_server_that_never_took_anything_is_waited_for_with_a_word_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(forward, "AWAY_SECONDS", 1.0)
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        run = new_run(tmp_path / "my runs", uri)
        forwarder = start_forwarder(run.path, nice=0)
        record(run, [1])
        wait_until(lambda: trouble_of(run) is not None, "the outage is noticed")
        end(run)
        said: list[str] = []
        result = forwarder.finish(say=said.append)
    (line,) = said
    assert f"waiting for MLflow at {uri}" in line
    assert "at most 6 s; Ctrl-C leaves it" in line
    command = f"python -m orchestrator.tracking.forward '{run.path}'"
    assert line.endswith(command)
    assert f"`{command}`" in result.message
    assert "Connection refused" in result.message
    assert "Max retries" not in result.message


def test_patience_is_for_stores_that_have_answered() -> None:
    never, took = Ledger("http://server", error="away"), Ledger("http://server", run_id="1", error="away")
    assert forward.patience(never) < forward.patience(took) < forward.patience(Ledger("http://server"))


def test_the_record_can_be_sent_to_another_store_than_the_one_that_was_away(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path, "http://127.0.0.1:1")
    record(run, [1, 2])
    end(run)
    refused = send_later(run.path, "tracking.uri=sqlite:////proc/m.db")
    assert refused.returncode == 2
    assert "nothing can be made in /proc" in refused.stderr
    sent = send_later(run.path, f"tracking.uri={uri}")
    assert sent.returncode == 0, sent.stderr
    assert points(uri) == once([1, 2])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    asked = send_later(tmp_path)
    assert asked.returncode == 2
    assert "usage" in asked.stdout
