"""Dry runs kept beside the runs, by the plan that they are about, so that a run that follows has its own in its record.

`dryrun` keeps a report under `<run.directory>/.dryrun/`; `train` puts the one of its plan into the run's folder as
`dryrun.json`. Refuses nothing: where the folder cannot be written, nothing is kept and the reason is told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.plan.dryrun_report import plan_hash
from orchestrator.plan.run_plan import RunPlan
from orchestrator.tracking.run_directory import write_atomically

FOLDER = ".dryrun"
NAME = "dryrun.json"
"""Name of the report in a run's folder."""


def keep(plan: RunPlan, report: dict[str, Any]) -> str:
    """Keep a report for a run of the same plan; the line that says where, or why not."""
    path = _path(plan.config, report["plan_hash"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        return f"Not kept: {path} cannot be written ({error.strerror or error})."
    return f"Kept in {path}; a run of this plan takes it into its record as {NAME}."


def kept_for(plan: RunPlan) -> dict[str, Any] | None:
    """The report of the last dry run of this plan; None: there is none that can be read."""
    try:
        found: dict[str, Any] = json.loads(_path(plan.config, plan_hash(plan)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _path(config: RunConfig, plan: str) -> Path:
    return Path(config.run.directory).expanduser().absolute() / FOLDER / f"{plan}.json"
