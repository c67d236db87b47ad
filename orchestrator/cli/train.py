"""`train`: plan, check, place, run, record. What happens when no command is named.

Everything that can be known to be wrong is asked first (`preflight.py`) and refused together, before a run folder
exists or Ray starts. Then one road: take the run's folder, start the MLflow forwarder, launch, write the summary, say
where everything lies. The run's folder is the last line on stdout.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.cli import closing
from orchestrator.cli.invocation import Invocation
from orchestrator.cli.preflight import plan_to_run
from orchestrator.cli.progress import make_progress
from orchestrator.cli.show import print_problems, print_warnings
from orchestrator.errors import Problem
from orchestrator.plan.auto import chosen
from orchestrator.plan.batch import steps_of
from orchestrator.plan.facts import derive
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.validate.rules import warn

if TYPE_CHECKING:
    from orchestrator.launch.request import LaunchOutcome
    from orchestrator.tracking.run_directory import RunDirectory

HELP = """\
python -m orchestrator [train] [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [-m]

Plans the training, checks everything that can be checked, places it on the Ray cluster at hand (RAY_ADDRESS, or a
cluster of its own on this machine), trains, saves and records. The same command continues a run that was interrupted:
Ctrl-C once saves and stops, twice ends it at once. A run's folder is runs/<experiment>-<hash>, printed last.
Exit code 0: finished; 2: refused, nothing was started; 3: failed; 4: stopped after saving.

  python -m orchestrator                                            the quick-start
  python -m orchestrator training.steps=50 run.name=short
  python -m orchestrator +experiment=llama7b_zero2 run.directory=/shared/runs
  python -m orchestrator optimizer.lr=1e-3,3e-4 training.seed=0,1 -m      four runs, checked together, one after another
"""

FLAGS = ("--multirun",)

_EXIT_CODES = {"finished": 0, "failed": 3, "stopped": 4}


def run(invocation: Invocation) -> int:
    """Train once, or once for every combination of a sweep. Raises RefusedError before anything is started."""
    started = _process_started()
    if invocation.multirun:
        from orchestrator.cli.sweep import train_all

        return train_all(invocation, started)
    return train(plan_to_run(invocation), invocation, started)


def train(plan: RunPlan, invocation: Invocation, started: float) -> int:
    """Launch a plan that has passed every check; `started` is when the command began, in `time.time()`."""
    from orchestrator.tracking.dryruns import NAME, kept_for
    from orchestrator.tracking.run_directory import open_run

    with contextlib.closing(open_run(plan.config, plan)) as directory:
        print("\n".join(closing.opening_lines(plan, directory)), flush=True)
        if (simulated := kept_for(plan)) is not None:
            directory.write_json(NAME, simulated)
        print_warnings((*chosen(plan), *warn(derive(plan.config))))
        print("starting Ray and the ranks", flush=True)
        return _EXIT_CODES[_launch_and_record(plan, directory, invocation, started)]


def _launch_and_record(plan: RunPlan, directory: RunDirectory, invocation: Invocation, started: float) -> str:
    from orchestrator.launch.run import LaunchRequest, launch
    from orchestrator.tracking.forward import start_forwarder

    steps = steps_of(plan.config.training)
    assert steps is not None, "a feasible plan has a length"
    forwarder = start_forwarder(directory.path)
    try:
        with make_progress(steps) as bar, contextlib.closing(_Keeper(plan, directory, bar.observe)) as kept:
            outcome = launch(LaunchRequest(plan, str(directory.path), started), kept.observe)
    except BaseException:
        forwarder.kill()  # nothing was started, so nothing was recorded
        directory.record_attempts(())
        raise
    summary = _record(plan, directory, outcome)
    tracked = None
    with contextlib.suppress(KeyboardInterrupt):  # whoever is in a hurry can send the rest later
        tracked = forwarder.finish(say=lambda line: print(line, flush=True))
    if tracked is None:
        forwarder.kill()
    elif tracked.run_id != summary["mlflow_run_id"]:
        summary["mlflow_run_id"] = tracked.run_id
        directory.write_json("summary.json", summary)
    lines = closing.closing_lines(plan, directory, outcome, summary, tracked, invocation, kept.save_error)
    print("\n".join(lines), flush=True)
    if outcome.problems:
        print_problems(_with_traceback(outcome, directory), opening=closing.problems_opening(outcome.status))
    print(directory.path, flush=True)
    return outcome.status


class _Keeper:
    """Writes what the launcher says into the run's folder at once, so that it is there however the run ends.

    `placement.json` and `plan.json`: where the ranks are, and another plan; `logs/launcher.jsonl`: all but the steps.
    """

    def __init__(self, plan: RunPlan, directory: RunDirectory, observe: Callable[[dict[str, Any]], None]) -> None:
        self._plan = plan.to_dict()
        self._directory = directory
        self._observe = observe
        self._table: list[dict[str, Any]] = []
        self.save_error = ""
        """Why the last checkpoint that was tried could not be written; empty when it could."""
        directory.logs.mkdir(parents=True, exist_ok=True)
        self._log = (directory.logs / "launcher.jsonl").open("a", encoding="utf-8", buffering=1)

    def observe(self, event: dict[str, Any]) -> None:
        """Keep where the ranks are (`placement`), which processes they are (`ready`), another plan (`replanned`); hand
        the event on."""
        if event["kind"] == "placement":
            self._table = [dict(entry) for entry in event["table"]]
            self._write(placement=self._table)
        elif event["kind"] == "ready":
            found = {identity["rank"]: identity for identity in event["ranks"]}
            self._table = [{**entry, **_process(found.get(entry["rank"], {}))} for entry in self._table]
            self._write(placement=self._table)
        elif event["kind"] == "replanned":
            self._write(**event["plan"])
        elif event["kind"] == "checkpoint":
            self.save_error = event.get("error") or ""
        if event["kind"] != "step":
            shown = {name: value for name, value in event.items() if name != "plan"}
            self._log.write(json.dumps({"time": time.time(), **shown}, default=str) + "\n")
        self._observe(event)

    def close(self) -> None:
        """Nothing more will be said."""
        self._log.close()

    def _write(self, **changes: Any) -> None:
        self._plan.update(changes)
        self._directory.write_json("plan.json", self._plan)
        self._directory.write_json("placement.json", self._table)


def _process(identity: dict[str, Any]) -> dict[str, Any]:
    return {"host": identity.get("host"), "pid": identity.get("pid"), "device_name": identity.get("device")}


def _record(plan: RunPlan, directory: RunDirectory, outcome: LaunchOutcome) -> dict[str, Any]:
    """Write what is known at the end into the run's folder: attempts and summary."""
    from orchestrator.checkpoint.folder import newest_complete
    from orchestrator.checkpoint.storage import StorageError
    from orchestrator.tracking.summary import build_summary

    directory.record_attempts(outcome.attempts)
    try:
        newest = newest_complete(directory.checkpoints)
    except StorageError as error:
        print_warnings([f"the summary names no checkpoint: {error}"])
        newest = None
    summary = build_summary(
        outcome.plan or plan,
        run_directory=directory.path,
        status=outcome.status,
        attempts=directory.attempts(),
        rank_results=outcome.rank_results,
        checkpoint=None if newest is None else newest.path,
    )
    if summary["seconds_to_first_step"] is None:
        summary["seconds_to_first_step"] = outcome.seconds_to_first_step
    summary["start_seconds"] = dict(outcome.timings)
    directory.write_json("summary.json", summary)
    return summary


def _with_traceback(outcome: LaunchOutcome, directory: RunDirectory) -> list[Problem]:
    problems = list(outcome.problems)
    if outcome.traceback:
        path = directory.logs / "traceback.txt"
        path.write_text(outcome.traceback, encoding="utf-8")
        problems.append(Problem("", f"The traceback of the rank that failed first is in {path}.", ""))
    return problems


def _process_started() -> float:
    """`time.time()` at which this process began, imports included."""
    import psutil

    return float(psutil.Process().create_time())
