"""Whether checkpoints can be written where a run wants them, found out before anything starts. No torch.

For an object store only: a file is written there and deleted again, with the credentials and the endpoint of this
machine, and what the run left there before is compared with what is asked for. Folders are tried by
`tracking/run_directory.py`.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from pydantic import ValidationError

from orchestrator.checkpoint.folder import newest_complete
from orchestrator.checkpoint.huggingface_folder import model_problems
from orchestrator.checkpoint.object_storage import hurried
from orchestrator.checkpoint.storage import StorageError, open_folder
from orchestrator.config.schema import ModelConfig, RunConfig
from orchestrator.config.urls import is_url
from orchestrator.errors import Problem

KEY = "checkpoint.directory"
_PATIENCE_SECONDS = 3.0


def check_destination(config: RunConfig, directory: str) -> tuple[Problem, ...]:
    """Every reason against the run's checkpoints going to `directory`, a path or URL. Leaves no trace.

    Whoever reads a store needs the same rights on every node; only this machine's are tried.
    """
    if not is_url(directory):
        return ()
    try:
        with hurried(_PATIENCE_SECONDS):
            folder = open_folder(directory)
            probe = f".probe-{uuid.uuid4().hex[:8]}"
            folder.write_whole(probe, b"")
            folder.remove_file(probe)
            newest = newest_complete(folder) if config.checkpoint.resume == "auto" else None
    except StorageError as error:
        return (Problem(KEY, f"{error.message}.", error.fix),)
    except FileNotFoundError as error:
        return (Problem(KEY, f"{directory} cannot be used: {error}.", "Name a bucket that exists."),)
    if newest is None:
        return ()
    try:
        saved = ModelConfig.model_validate(newest.manifest.config.get("model", {}))
    except ValidationError:
        return (Problem(KEY, f"The manifest of {newest.path} does not say which model was saved.", "Give another."),)
    fix = "Set {}, or give another run.name or checkpoint.directory."
    return tuple(
        replace(problem, fix=fix.format(problem.fix.removeprefix("Set ").partition(";")[0]))
        for problem in model_problems(KEY, newest.path, saved, config.model)
    )
