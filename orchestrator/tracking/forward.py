"""The forwarder: a process of low priority that carries a run's record to MLflow, never in training's way.

`metrics.jsonl` is the record; this process follows it, sends what is new, and notes in `tracking.json` how far it came.
When MLflow is away it tries again and loses nothing. It ends when the run's `summary.json` is there and all is sent, or
when its parent says so or is gone. `python -m orchestrator.tracking.forward RUN` sends what is left later.

`start_forwarder` is for the command that trains; the work itself is in `forwarding.py`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.tracking.destination import how_to_look, resolve_uri, shown
from orchestrator.tracking.ledger import open_ledger, read_ledger, write_ledger

LOG_NAME = "tracking.log"
_FINISH = b"finish"
LOWEST_PRIORITY = 19
FINISH_SECONDS = 120.0
"""A quiet core needs 5 s (importing MLflow 2, a new database 2); the rest is for busy machines and slow servers."""
_KILL_MARGIN_SECONDS = 5.0
_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class TrackingResult:
    """What became of the MLflow record."""

    complete: bool
    """Whether MLflow has everything."""
    run_id: str | None
    uri: str
    """Without a password."""
    message: str
    """For the closing lines: how to look at it, or what is missing and how to send it later."""


class Forwarder:
    """A running forwarder, seen from the command that started it."""

    def __init__(self, run_directory: Path, uri: str, process: subprocess.Popen[bytes]) -> None:
        self._run_directory = run_directory
        self._uri = uri
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def finish(self, timeout: float = FINISH_SECONDS) -> TrackingResult:
        """Let it send what is left, `summary.json` included, for at most `timeout` seconds. Never raises for MLflow."""
        deadline = time.monotonic() + timeout
        # From here, because over there it may be deep in MLflow's imports, and slow to hear of it at its low priority.
        set_priority(self.pid, 0)
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(_FINISH + b" %f\n" % timeout)
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # It has ended already; the ledger says how far it came.
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()) + _KILL_MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        return tracking_result(self._run_directory, self._uri)

    def kill(self) -> None:
        """End it at once; nothing is lost, the record can be sent later."""
        self._process.kill()
        self._process.wait()


def start_forwarder(run_directory: str | os.PathLike[str], *, nice: int = LOWEST_PRIORITY) -> Forwarder:
    """Start the forwarder of a run whose `config.yaml` is written. Returns at once; MLflow is imported later, there.

    It gets a session of its own (Ctrl-C does not reach it), writes to `logs/tracking.log`, and ends when this process
    does: its standard input is the line between the two.

    Args:
        run_directory: the run's folder.
        nice: its priority while training runs. At 19 it takes about 1.5 % of a core that is busy otherwise, so on a
            machine without a core to spare MLflow is mostly filled at the end, when the priority becomes normal.
    """
    folder = Path(run_directory).absolute()
    asked = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["tracking"]["uri"]
    uri = resolve_uri(asked, os.environ, Path.cwd())
    write_ledger(folder, open_ledger(folder, uri))
    (folder / "logs").mkdir(exist_ok=True)
    path = os.pathsep.join(part for part in (str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")) if part)
    with (folder / "logs" / LOG_NAME).open("ab") as log:
        process = subprocess.Popen(
            # -P: a folder of the user's that happens to be called like a package must not be taken for it.
            [sys.executable, "-P", "-m", "orchestrator.tracking.forward", f"--follow={nice}", str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    return Forwarder(folder, uri, process)


def set_priority(pid: int, nice: int) -> None:
    """Low (19) while training runs, 0 when it is over and a user waits; as far as the system allows."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    with contextlib.suppress(OSError):
        # Linux shares the CPU between sessions first (autogroups), and the forwarder has one of its own.
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def tracking_result(folder: Path, uri: str) -> TrackingResult:
    """What the ledger of a run's folder says, in words."""
    ledger = read_ledger(folder)
    if ledger is None:
        return TrackingResult(False, None, shown(uri), f"{folder} has no readable tracking.json.")
    if ledger.complete:
        return TrackingResult(True, ledger.run_id, shown(ledger.uri), how_to_look(ledger.uri))
    why = f": {ledger.error}" if ledger.error else ""
    return TrackingResult(
        False,
        ledger.run_id,
        shown(ledger.uri),
        f"MLflow at {shown(ledger.uri)} has not everything yet (steps up to {ledger.last_step}){why}. Nothing is lost: "
        f"send the rest with `python -m orchestrator.tracking.forward {folder}`; its log is "
        f"{folder / 'logs' / LOG_NAME}.",
    )


def main(arguments: Sequence[str]) -> int:
    """The process. With `--follow` it belongs to a command that trains; without, it sends what is there and reports."""
    follow = [argument.removeprefix("--follow=") for argument in arguments if argument.startswith("--follow=")]
    folders = [argument for argument in arguments if not argument.startswith("-")]
    if len(folders) != 1 or not (Path(folders[0]) / "config.yaml").is_file():
        print("usage: python -m orchestrator.tracking.forward RUN   (RUN: the folder of a run, with its config.yaml)")
        return 2
    folder = Path(folders[0]).absolute()
    from orchestrator.tracking.forwarding import follow_run, send_run

    if follow:
        return 0 if follow_run(folder, int(follow[0])) else 1
    ledger = read_ledger(folder)
    uri = ledger.uri if ledger is not None else resolve_uri(_asked_uri(folder), os.environ, Path.cwd())
    with _output_to(folder / "logs" / LOG_NAME):
        send_run(folder, uri)
    result = tracking_result(folder, uri)
    print(result.message)
    return 0 if result.complete else 1


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Send everything that libraries print, alembic's lines included, to a file instead of the console."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, target in zip(kept, (1, 2), strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)


def _asked_uri(folder: Path) -> str | None:
    values: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    uri = values["tracking"]["uri"]
    return None if uri is None else str(uri)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
