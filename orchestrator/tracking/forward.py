"""The forwarder: a process of low priority that carries a run's record to MLflow, never in training's way.

`metrics.jsonl` is the record; this process follows it, sends what is new, and notes in `tracking.json` how far it came.
When MLflow is away it tries again and loses nothing. It ends when the run's `summary.json` is there and all is sent, or
when its parent says so or is gone. `python -m orchestrator.tracking.forward RUN` sends what is left later.

`start_forwarder` is for the command that trains; the work itself is in `forwarding.py`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from orchestrator.tracking.destination import check_store, how_to_look, resolve_uri, shown
from orchestrator.tracking.ledger import Ledger, open_ledger, read_ledger, write_ledger

LOG_NAME = "tracking.log"
_FINISH = b"finish"
LOWEST_PRIORITY = 19
FINISH_SECONDS = 120.0
"""A quiet core needs 5 s (importing MLflow 2, a new database 2); the rest is for busy machines and slow servers."""
OUTAGE_SECONDS = 30.0
"""When MLflow has taken something and was away when last tried."""
AWAY_SECONDS = 10.0
"""When it has never taken anything and was away when last tried."""
_QUIET_SECONDS = 1.0
"""A wait that needs no word."""
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

    def finish(self, timeout: float | None = None, say: Callable[[str], None] = lambda _: None) -> TrackingResult:
        """Let it send what is left, `summary.json` included. Never raises for MLflow.

        Args:
            timeout: seconds that it has for that; None: by what MLflow did so far (`patience`).
            say: hears within a second or two that there is a wait, and for how long at most.
        """
        seconds = patience(read_ledger(self._run_directory)) if timeout is None else timeout
        deadline = time.monotonic() + seconds + _KILL_MARGIN_SECONDS
        # From here, because over there it may be deep in MLflow's imports, and slow to hear of it at its low priority.
        set_priority(self.pid, 0)
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(_FINISH + b" %f\n" % seconds)
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # It has ended already; the ledger says how far it came.
        if not self._ends_within(min(_QUIET_SECONDS, seconds)):
            say(
                f"waiting for MLflow at {shown(self._uri)} to take the rest, for at most "
                f"{deadline - time.monotonic():.0f} s; Ctrl-C leaves it, then it is sent by: "
                f"{how_to_send(self._run_directory)}"
            )
            if not self._ends_within(deadline - time.monotonic()):
                self.kill()
        return tracking_result(self._run_directory, self._uri)

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once; nothing is lost, the record can be sent later."""
        self._process.kill()
        self._process.wait()


def start_forwarder(run_directory: str | os.PathLike[str], *, nice: int = LOWEST_PRIORITY) -> Forwarder:
    """Start the forwarder of a run whose `config.yaml` is written. Returns at once; MLflow is imported there.

    It gets a session of its own (Ctrl-C does not reach it), writes to `logs/tracking.log`, and ends when this process
    does: its standard input is the line between the two.

    Args:
        run_directory: the run's folder.
        nice: its priority while training runs, from its first send on; before that it is higher
            (`forwarding.STARTING_PRIORITY`). At 19 it takes about 1.5 % of a core that is busy otherwise.
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


def patience(ledger: Ledger | None) -> float:
    """Seconds that MLflow gets for the rest at the end of a run, by what it did so far."""
    if ledger is None or ledger.error is None:
        return FINISH_SECONDS
    return AWAY_SECONDS if ledger.run_id is None else OUTAGE_SECONDS


def how_to_send(folder: Path) -> str:
    """What to type to send the rest of a run's record."""
    return f"python -m orchestrator.tracking.forward {shlex.quote(str(folder))}"


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
        f"send the rest with `{how_to_send(folder)}` (to another store: with tracking.uri=URI after it); its log is "
        f"{folder / 'logs' / LOG_NAME}.",
    )


_USAGE = """\
usage: python -m orchestrator.tracking.forward RUN [tracking.uri=URI]
RUN: the folder of a run, with its config.yaml; URI: another store than the one it was sent to so far"""
_SETTING = "tracking.uri="


def main(arguments: Sequence[str]) -> int:
    """The process. With `--follow` it belongs to a command that trains; without, it sends what is there and reports."""
    follow = [argument.removeprefix("--follow=") for argument in arguments if argument.startswith("--follow=")]
    others = [argument.removeprefix(_SETTING) for argument in arguments if argument.startswith(_SETTING)]
    folders = [argument for argument in arguments if not argument.startswith(("-", _SETTING))]
    if len(folders) != 1 or not (Path(folders[0]) / "config.yaml").is_file():
        print(_USAGE)
        return 2
    folder = Path(folders[0]).absolute()
    if follow:
        from orchestrator.tracking.forwarding import follow_run

        return 0 if follow_run(folder, int(follow[0])) else 1
    return _send(folder, others[-1] if others else None)


def _send(folder: Path, other: str | None) -> int:
    ledger = read_ledger(folder)
    asked = other or (None if ledger is None else ledger.uri) or _asked_uri(folder)
    uri = resolve_uri(asked, os.environ, Path.cwd())
    if problems := check_store(uri, _SETTING.rstrip("=")):
        print("\n".join(f"{problem.message}\n{problem.fix}" for problem in problems), file=sys.stderr)
        return 2
    from orchestrator.tracking.forwarding import send_run

    (folder / "logs").mkdir(exist_ok=True)
    try:
        with _output_to(folder / "logs" / LOG_NAME) as console:
            send_run(folder, uri, lambda line: print(line, file=console, flush=True))
    except KeyboardInterrupt:
        print("\nStopped; the same command sends the rest.", file=sys.stderr)
        return 4
    result = tracking_result(folder, uri)
    print(result.message)
    return 0 if result.complete else 1


@contextmanager
def _output_to(log: Path) -> Iterator[TextIO]:
    """Send everything that libraries print, alembic's lines included, to a file; gives what still writes to stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        with os.fdopen(os.dup(kept[1]), "w") as console:
            yield console
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
