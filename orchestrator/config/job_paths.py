"""What the paths of a configuration mean inside a Ray job. Pure.

A job's current folder is a copy of the upload on one node, which Ray deletes afterwards: what is written below it is
lost, and what is read must have been uploaded. Refuses relative places of output; `cli/submit.py` and
`cli/preflight.py` ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.config.schema import RunConfig
from orchestrator.config.urls import is_url
from orchestrator.errors import Problem

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the command of a job, and for no other."""
WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Seconds between Ray's SIGTERM and its SIGKILL when a job is stopped; read from the job's environment."""
RAYS_WAIT_SECONDS = 3
"""What Ray waits when nothing is said."""
_AFTER_SAVING_SECONDS = 60
"""For the end of a stopped run beside its last checkpoint: the record is sent, Ray is left."""
_OUTPUTS = ("run.directory", "checkpoint.directory")
_INPUTS = {"data.path": (), "data.tokenizer": ("bytes",), "checkpoint.resume": ("auto", "never"),
           "checkpoint.init_from": ()}  # fmt: skip


def in_a_job(environment: Mapping[str, str]) -> bool:
    """Whether this command is the entrypoint of a Ray job."""
    return JOB_VARIABLE in environment


def is_relative(place: str) -> bool:
    """Whether a path depends on the current folder, or on whose home `~` is; an object store's address does not."""
    return not is_url(place) and not Path(place).is_absolute()


def output_problems(config: RunConfig) -> list[Problem]:
    """Places of output that a job would lose."""
    problems = []
    for key in _OUTPUTS:
        place = _value(config, key)
        if place is not None and is_relative(place):
            problems.append(
                Problem(
                    key,
                    f"{key}={place} is relative: in a job it would lie in Ray's copy of the upload on one node, which "
                    "is deleted.",
                    f"Give an absolute path on storage that all nodes share, as {key}=/shared/{Path(place).name}.",
                )
            )
    return problems


def input_problems(config: RunConfig, uploaded: Callable[[str], bool]) -> list[Problem]:
    """Relative places of input that are not part of the upload; `uploaded` says of a relative path whether it is."""
    problems = []
    for key, words in _INPUTS.items():
        place = _value(config, key)
        if place is not None and place not in words and is_relative(place) and not uploaded(place):
            problems.append(
                Problem(
                    key,
                    f"{key}={place} is relative and not part of the upload: the job would not find it.",
                    "Give an absolute path on storage that all nodes share, or put it into this folder, not ignored.",
                )
            )
    return problems


def tracking_in_a_job(config: RunConfig, environment: Mapping[str, str]) -> str | None:
    """`tracking.uri` for a job whose record would otherwise go to a file below its folder; None: it is fine as it is.

    The database then lies beside the runs, in `run.directory`.
    """
    uri = config.tracking.uri or environment.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if not uri.startswith("sqlite:///") or uri.startswith("sqlite:////"):
        return None
    folder = (
        "/shared/runs" if is_relative(config.run.directory) else config.run.directory
    )  # the former only to be shown
    return f"sqlite:///{Path(folder) / Path(uri.removeprefix('sqlite:///')).name}"


def tracking_problems(config: RunConfig, environment: Mapping[str, str]) -> list[Problem]:
    """Why the record of a job that was not sent by `submit` would be lost."""
    better = tracking_in_a_job(config, environment)
    if better is None:
        return []
    return [
        Problem(
            "tracking.uri",
            "the MLflow record would go to a file in the job's folder, which Ray deletes.",
            f"Set tracking.uri={better}, or MLFLOW_TRACKING_URI to a server.",
        )
    ]


def stop_seconds(config: RunConfig) -> int:
    """Seconds that a stopped job needs, for `WAIT_VARIABLE`."""
    return math.ceil(config.fault_tolerance.grace_seconds) + _AFTER_SAVING_SECONDS


def stop_warning(config: RunConfig, environment: Mapping[str, str]) -> str | None:
    """What to say when Ray would kill this job before it could save; None when there is time enough, or no job."""
    if not in_a_job(environment):
        return None
    given = environment.get(WAIT_VARIABLE, str(RAYS_WAIT_SECONDS))
    grace = config.fault_tolerance.grace_seconds
    if given.isdecimal() and int(given) >= grace:
        return None
    return (
        f"`ray job stop` kills this job after {given} s ({WAIT_VARIABLE}), and its last checkpoint may take "
        f"{grace:g} s (fault_tolerance.grace_seconds). Submit it with "
        f'--runtime-env-json \'{{"env_vars": {{"{WAIT_VARIABLE}": "{stop_seconds(config)}"}}}}\'.'
    )


def _value(config: RunConfig, key: str) -> str | None:
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    return value if isinstance(value, str) else None
