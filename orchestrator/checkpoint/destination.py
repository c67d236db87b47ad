"""Whether checkpoints can be written where a run wants them, found out before anything starts. No torch.

In an object store a file is written and deleted again, with the credentials and the endpoint of this machine; whether a
folder can be written is tried by `tracking/run_directory.py`. What a run of this name left there before, from another
machine, is compared with what is asked for: a new run must not mix its checkpoints with another's.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from pydantic import ValidationError

from orchestrator.checkpoint.folder import Checkpoint, newest_complete
from orchestrator.checkpoint.huggingface_folder import model_problems
from orchestrator.checkpoint.object_storage import hurried
from orchestrator.checkpoint.storage import Folder, StorageError, open_folder
from orchestrator.config.schema import ModelConfig, RunConfig
from orchestrator.config.urls import is_url, url_problem
from orchestrator.errors import Problem

KEY = "checkpoint.directory"
_PATIENCE_SECONDS = 3.0


def check_destination(config: RunConfig, directory: str, *, continues: bool = False) -> tuple[Problem, ...]:
    """Every reason against the run's checkpoints going to `directory`, a path or URL. Leaves no trace.

    Args:
        config: what was asked for.
        directory: where this run's checkpoints would go.
        continues: whether an unfinished run of this machine goes on; what lies there is its own then.

    Whoever reads a store needs the same rights on every node; only this machine's are tried.
    """
    if url_problem(config.checkpoint.directory or "") is not None:
        return ()  # told by the check of the configuration
    try:
        with hurried(_PATIENCE_SECONDS):
            if is_url(directory):
                _try(open_folder(directory))
            newest = None if continues else newest_complete(directory)
    except StorageError as error:
        return (Problem(KEY, f"{error.message}.", error.fix),)
    except FileNotFoundError as error:
        return (Problem(KEY, f"{directory} cannot be used: {error}.", "Name a bucket that exists."),)
    if newest is None:
        return ()
    if config.checkpoint.resume != "auto":
        return (
            Problem(
                KEY,
                f"{directory} holds checkpoints of a run of this name already, the newest of step {newest.step}: a new "
                f"run (checkpoint.resume={config.checkpoint.resume}) would mix its own with them.",
                "Give another run.name or checkpoint.directory, or go on from them with checkpoint.resume=auto.",
            ),
        )
    return _other_model(config, newest)


def _try(folder: Folder) -> None:
    """Write a file and delete it again."""
    probe = f".probe-{uuid.uuid4().hex[:8]}"
    folder.write_whole(probe, b"")
    folder.remove_file(probe)


def _other_model(config: RunConfig, newest: Checkpoint) -> tuple[Problem, ...]:
    """What a run on another machine left there is gone on from, so it must be of this model."""
    try:
        saved = ModelConfig.model_validate(newest.manifest.config.get("model", {}))
    except ValidationError:
        return (Problem(KEY, f"The manifest of {newest.path} does not say which model was saved.", "Give another."),)
    fix = "Set {}, or give another run.name or checkpoint.directory."
    return tuple(
        replace(problem, fix=fix.format(problem.fix.removeprefix("Set ").partition(";")[0]))
        for problem in model_problems(KEY, newest.path, saved, config.model)
    )
