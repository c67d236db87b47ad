"""What the forwarder does: follow a run's record, send it in batches, bring it to its end. Time and MLflow live here.

`Forwarding.turn` is one try at everything that is due and raises when MLflow is away; the loops around it decide when
to try again and when to give up. The first thing to send is that the ranks have been placed; until then, while Ray and
the ranks start, MLflow is imported and a new database made, and nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator.tracking.forward import patience, set_priority
from orchestrator.tracking.identity import PLAN_PREFIX, flatten
from orchestrator.tracking.ledger import open_ledger, read_ledger, write_ledger
from orchestrator.tracking.lifetime import began_ms, ended_ms
from orchestrator.tracking.metrics_log import REWOUND_NAME, read_records
from orchestrator.tracking.mlflow_environment import in_words, set_up_environment
from orchestrator.tracking.run_directory import write_atomically
from orchestrator.tracking.tail import MetricsTail, Point, after, points_of, timestamp_ms

if TYPE_CHECKING:
    from orchestrator.tracking.mlflow_run import MlflowRun

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
_ORPHAN_SECONDS = 10.0
"""What a forwarder whose command died gives itself for the rest."""
STARTING_PRIORITY = 10
"""Until the first send is done. It costs seconds of a core once (importing MLflow, a new database); at the lowest
priority that would last as long as a short training beside busy ranks."""
_PLACEMENT = "placement.json"
_FILES = ("config.yaml", "plan.json", _PLACEMENT, "summary.json")
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Forwarding:
    """The state of one forwarder."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder = folder
        self.config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        self.ledger = open_ledger(folder, uri)
        self._tail = MetricsTail(folder / "metrics.jsonl")
        self._run: MlflowRun | None = None
        self._prepared = False
        self._uncertain = True
        """Whether the store may have more than the ledger says: at the start and after every failure."""
        self._waiting: list[dict[str, Any]] = []
        """Records read and not yet sent."""
        self._attempt = 0
        self._earlier_placement = self._placement()
        self.ended = False
        """Whether the run's end has been sent."""

    def turn(self, *, ending: bool) -> bool:
        """Try once to send all that is due; with `ending` also how the run ended. Returns whether anything was sent."""
        records, rewound = self._tail.read()
        if rewound:
            # Lines that waited may have been taken back; the file says what holds now.
            self._waiting.clear()
        self._waiting.extend(records)
        if not (self._waiting or ending or self._is_starting()):
            return False
        run = self._ready_run()
        self._send_waiting(run)
        if ending:
            self._send_end(run)
            self.ended = True
        return True

    def _is_starting(self) -> bool:
        """Whether ranks have been placed since we began, and MLflow does not know of it."""
        return not self._prepared and self._placement() not in (None, self._earlier_placement)

    def _placement(self) -> tuple[int, int] | None:
        """Tells one placement from another; None without any."""
        try:
            status = (self.folder / _PLACEMENT).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def failed(self, error: BaseException) -> None:
        """Note a failed try; what it did over there is found out before the next one sends anything."""
        self._uncertain = True
        self._note(error=f"{type(error).__name__}: {in_words(error)}")

    def _note(self, **changes: Any) -> None:
        self.ledger = replace(self.ledger, **changes)
        write_ledger(self.folder, self.ledger)

    def _ready_run(self) -> MlflowRun:
        from orchestrator.tracking.mlflow_run import MlflowRun, RunIsGoneError

        tracking = self.config["tracking"]
        if self._run is None:
            run_id = self.ledger.run_id or os.environ.get("MLFLOW_RUN_ID")
            if run_id:
                run = MlflowRun(self.ledger.uri, run_id)
                try:
                    run.resume()
                except RunIsGoneError as error:
                    if self.ledger.run_id is None:
                        raise  # The user named it; taking another one would hide the mistake.
                    _LOG.warning("%s; a new one gets the whole record", error)
                    self._start_over()
                    return self._ready_run()
            else:
                name = tracking["run_name"] or self.folder.name
                began = began_ms(self.folder)
                run = MlflowRun.create(self.ledger.uri, tracking["experiment"], name, self.ledger.token, began)
            self._run = run
            self._note(run_id=run.run_id)
        if self._uncertain:
            self._reconcile(self._run)
            self._uncertain = False
        if not self._prepared:
            self._prepare(self._run)
            self._prepared = True
        return self._run

    def _start_over(self) -> None:
        self.ledger = type(self.ledger)(self.ledger.uri)
        self._tail = MetricsTail(self._tail.path)
        self._waiting = self._tail.read()[0]

    def _reconcile(self, run: MlflowRun) -> None:
        """Move the ledger forward to what the store has of our own lines: a batch may have arrived unnoticed."""
        files = (self._tail.path, self.folder / REWOUND_NAME)
        own = [*self._waiting, *(record for path in files for record in read_records(path, lists=False))]
        stamped = {(int(record["step"]), timestamp_ms(record)) for record in own}
        step = max((step for step, _ in stamped & run.stamps("loss")), default=0)
        validation = max((step for step, _ in stamped & run.stamps("validation_loss")), default=0)
        ledger = self.ledger
        self._note(
            last_step=max(ledger.last_step, step), last_validation_step=max(ledger.last_validation_step, validation)
        )

    def _prepare(self, run: MlflowRun) -> None:
        run.set_tags(
            {
                **self.config["tracking"]["tags"],
                "orchestrator.run_directory": str(self.folder),
                "orchestrator.experiment": self.config["run"]["experiment"],
                "orchestrator.host": socket.gethostname(),
            }
        )
        parameters = flatten({key: value for key, value in self.config.items() if key != "tracking"})
        run.log_parameters({key: _plain(value) for key, value in (parameters | self._decided()).items()})
        run.log_files(self._files())

    def _decided(self) -> dict[str, Any]:
        """The degrees of the plan, which `auto` and a re-plan leave open in the configuration, as `plan.KEY`."""
        try:
            plan = json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {f"{PLAN_PREFIX}{key}": value for key, value in (plan.get("parallel") or {}).items()}

    def _files(self) -> list[Path]:
        return [path for name in _FILES if (path := self.folder / name).is_file()]

    def _send_waiting(self, run: MlflowRun) -> None:
        from orchestrator.tracking.mlflow_run import POINTS_PER_CALL

        while self._waiting:
            points: list[Point] = []
            taken = 0
            sent = self.ledger.sent
            for record in self._waiting:
                more = points_of(record, sent)
                if points and len(points) + len(more) > POINTS_PER_CALL:
                    break
                points += more
                sent = after(sent, more)
                taken += 1
            if points:
                run.log_points(points)
            attempt = max((int(record.get("attempt", 1)) for record in self._waiting[:taken]), default=0)
            del self._waiting[:taken]
            self.ledger = self.ledger.with_sent(sent)
            write_ledger(self.folder, self.ledger)
            if attempt > self._attempt:
                self._attempt = attempt
                run.set_tags({"orchestrator.attempt": attempt})

    def _send_end(self, run: MlflowRun) -> None:
        summary = self._finished_summary(run)
        if summary is None:
            run.end("KILLED", ended_ms(self.folder))
            self._note(error="the command ended without a summary")
            return
        attempts = summary.get("attempts") or []
        run.set_tags(
            {
                "orchestrator.status": summary["status"],
                "orchestrator.steps": summary.get("steps"),
                "orchestrator.attempts": len(attempts),
                "orchestrator.restarts": max(0, len(attempts) - 1),
                "orchestrator.causes": ", ".join(str(attempt.get("cause")) for attempt in attempts),
                "orchestrator.recovery_seconds": _recoveries(attempts),
                "orchestrator.checkpoint": summary.get("checkpoint"),
            }
        )
        run.log_parameters({key: _plain(value) for key, value in self._decided().items()})
        points = _comparison(summary, self._end_ms())
        if points:
            run.log_points(points)
        run.log_files(self._files())
        run.end(_STATUS.get(summary["status"], "FAILED"), ended_ms(self.folder))
        self._note(complete=True, error=None)

    def _finished_summary(self, run: MlflowRun) -> dict[str, Any] | None:
        """The summary, with the run's id put in where the command could not know it yet."""
        path = self.folder / "summary.json"
        try:
            summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if summary.get("mlflow_run_id") != run.run_id:
            summary["mlflow_run_id"] = run.run_id
            write_atomically(path, json.dumps(summary, indent=2) + "\n")
        return summary

    def _end_ms(self) -> int:
        # The last record's time, so that ending twice writes the same points.
        records = read_records(self._tail.path, lists=False)
        return timestamp_ms(records[-1]) if records else 0


def _recoveries(attempts: Sequence[Mapping[str, Any]]) -> str:
    """Seconds from each failure to the next first step, in the order of the attempts that mended them."""
    return ", ".join("-" if (s := attempt.get("recovery_seconds")) is None else f"{s:.1f}" for attempt in attempts[1:])


def _comparison(summary: Mapping[str, Any], time_ms: int) -> list[Point]:
    """What was predicted beside what was measured, as metrics of the last step."""
    step = int(summary.get("steps") or 0)
    return [
        Point(f"{kind}.{key}", float(value), step, time_ms)
        for kind in ("predicted", "measured")
        for key, value in (summary.get(kind) or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def follow_run(folder: Path, nice: int) -> bool:
    """Follow a run until it ends, as the child of the command that trains it. Returns whether everything was sent."""
    parent = _Parent()
    _live_quietly(min(nice, STARTING_PRIORITY))
    forwarding = Forwarding(folder, _noted_uri(folder))
    with contextlib.suppress(Exception):  # the first turn meets it again, and notes it
        _get_ready(forwarding.ledger.uri)
    pause = _FIRST_PAUSE_SECONDS
    trouble, started = False, False
    while not forwarding.ended:
        parent.wait(pause if trouble else _POLL_SECONDS)
        ending = parent.deadline is not None or (folder / "summary.json").is_file()
        try:
            sent = forwarding.turn(ending=ending)
            trouble, pause = False, _FIRST_PAUSE_SECONDS
            if sent and not started and not ending:
                started = True
                set_priority(os.getpid(), nice)
        except Exception as error:
            _report(forwarding, error)
            parent.wait_at_most(patience(forwarding.ledger))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS) if trouble else _FIRST_PAUSE_SECONDS
            trouble = True
        if parent.deadline is not None and time.monotonic() >= parent.deadline:
            break
    return forwarding.ledger.complete


def send_run(folder: Path, uri: str, say: Callable[[str], None] = lambda _: None) -> bool:
    """Send what is left of a run that has ended. Returns whether MLflow has everything now.

    `say` hears, at the first failure, for how long it is tried again.
    """
    set_up_environment()
    forwarding = Forwarding(folder, uri)
    deadline: float | None = None
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            forwarding.turn(ending=True)
            return forwarding.ledger.complete
        except Exception as error:
            _report(forwarding, error)
        if deadline is None:
            seconds = patience(forwarding.ledger)
            deadline = time.monotonic() + seconds
            say(f"{forwarding.ledger.error}; trying again for {seconds:.0f} s")
        if time.monotonic() + pause >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _get_ready(uri: str) -> None:
    """What costs seconds of a core, once, and needs nothing of the run."""
    from orchestrator.tracking.mlflow_run import make_database

    make_database(uri)


class _Parent:
    """The command that trains, heard through standard input: a line `finish SECONDS`, or the end when it is gone.

    A thread listens, because importing MLflow or a call to a dead server may take longer than there is time.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Monotonic time by which the process ends; None while training goes on."""
        self._finishing_since = 0.0
        self._heard = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait for a word, at most so long and never beyond the deadline."""
        if self.deadline is not None:
            seconds = max(0.0, min(seconds, self.deadline - time.monotonic()))
        self._heard.wait(seconds)
        self._heard.clear()

    def wait_at_most(self, seconds: float) -> None:
        """Bring the deadline, where there is one, to so long after it was set."""
        if self.deadline is not None:
            self.deadline = min(self.deadline, self._finishing_since + seconds)

    def _listen(self) -> None:
        while word := os.read(0, 4096):
            if word.startswith(b"finish "):
                self._end_within(float(word.split()[1]))
        self._end_within(_ORPHAN_SECONDS)
        # A call to a dead server may hang for longer than that; the alarm ends the process in any case.
        signal.alarm(int(2 * _ORPHAN_SECONDS))

    def _end_within(self, seconds: float) -> None:
        now = time.monotonic()
        self._finishing_since = now
        self.deadline = min(self.deadline or now + seconds, now + seconds)
        self._heard.set()


def _live_quietly(nice: int) -> None:
    """Low priority, deaf to Ctrl-C: the parent decides when this ends, and until then training comes first."""
    set_priority(os.getpid(), nice)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a Ray job that is stopped sends it to every process of the job
    set_up_environment()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _report(forwarding: Forwarding, error: Exception) -> None:
    forwarding.failed(error)
    _LOG.warning("MLflow did not take it, it will be tried again: %s", forwarding.ledger.error)
    _LOG.debug("%s", traceback.format_exc())


def _noted_uri(folder: Path) -> str:
    ledger = read_ledger(folder)
    if ledger is None:
        raise RuntimeError(f"{folder} has no tracking.json; `start_forwarder` writes it")
    return ledger.uri
