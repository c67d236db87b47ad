"""Whether the checkpoint that a configuration starts from can be used and leaves a step to do. No torch.

Found out before anything starts. Names and sizes of its files and its model are compared; every byte is verified by the
ranks when they load it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from orchestrator.checkpoint.find import find
from orchestrator.checkpoint.folder import Checkpoint, newest_complete, open_checkpoint
from orchestrator.checkpoint.huggingface_folder import FETCH, is_huggingface, model_problems
from orchestrator.checkpoint.huggingface_start import problems_of_weights
from orchestrator.checkpoint.manifest import step_of
from orchestrator.checkpoint.storage import StorageError
from orchestrator.config.schema import ModelConfig, RunConfig, TrainingConfig
from orchestrator.config.urls import is_url
from orchestrator.errors import Problem
from orchestrator.plan.batch import steps_of, tokens_per_step

_NO_PLACE = ("auto", "never")


def check_start(config: RunConfig) -> tuple[Problem, ...]:
    """Every reason against `checkpoint.resume=PATH` and `checkpoint.init_from`."""
    problems: list[Problem] = []
    resume, weights = config.checkpoint.resume, config.checkpoint.init_from
    if resume not in _NO_PLACE:
        problems += _problems_of(config, "checkpoint.resume", resume)
        if weights is not None:
            problems.append(
                Problem(
                    "checkpoint.init_from",
                    f"checkpoint.resume={resume} brings its own weights: those of checkpoint.init_from={weights} would "
                    "be ignored.",
                    "Set checkpoint.init_from=null to go on from the one, or checkpoint.resume=auto to begin with the "
                    "weights of the other.",
                )
            )
    if weights is not None:
        problems += _problems_of(config, "checkpoint.init_from", weights)
    return tuple(problems)


def check_length(config: RunConfig, directory: str) -> tuple[Problem, ...]:
    """Whether a step is left to do after what a run with its checkpoints in `directory` (path or URL) would go on from.

    One that has all its steps and was killed before it could say so is let through: it only ends. A shorter length than
    a run has reached would end it in the middle, as finished, and what it was to do would be lost.
    """
    steps, asked = steps_of(config.training), config.checkpoint.resume
    if steps is None or asked == "never":
        return ()
    try:
        own = newest_complete(directory)
        start = open_checkpoint(_place(asked)) if own is None and asked != "auto" else own
    except (ValueError, OSError):
        return ()  # told by who judges the place
    if start is None or start.step < steps or (own is not None and _length_when_saved(own) == steps):
        return ()
    by_steps = config.training.steps is not None
    key, length = ("training.steps", steps) if by_steps else ("training.tokens", config.training.tokens)
    least = start.step if by_steps else start.step * tokens_per_step(config.training)
    if own is None:
        message = f"checkpoint.resume={asked} is at step {start.step} already: with {key}={length} no step is left."
        return (Problem(key, message, f"Set {key} above {least}."),)
    before = _length_when_saved(own)
    was = "" if before is None else f" of {before}"
    message = f"This run is at step {own.step}{was} already ({own.path}): {key}={length} would end it there."
    return (Problem(key, message, f"Set {key} above {least}, or give another run.name."),)


def _length_when_saved(checkpoint: Checkpoint) -> int | None:
    """Steps that the run was to have when it saved; None where the manifest does not say."""
    try:
        return steps_of(TrainingConfig.model_validate(checkpoint.manifest.config["training"]))
    except (ValidationError, KeyError):
        return None


def _place(asked: str) -> str:
    return asked if is_url(asked) else str(Path(asked).expanduser())


def _problems_of(config: RunConfig, key: str, asked: str) -> list[Problem]:
    place = _place(asked)
    words = "`auto`, `never` or " if key == "checkpoint.resume" else ""
    fix = f"Give {words}the folder of a checkpoint, for example RUN/checkpoints/step-00000200."
    if key == "checkpoint.init_from":
        fix = f"{fix[:-1]}, or a Hugging Face folder; nothing is downloaded: {FETCH}."
    try:
        if is_huggingface(place):
            return problems_of_weights(config, place) if key == "checkpoint.init_from" else [_weights_alone(key, asked)]
        if (other := _something_else(key, asked, place, fix)) is not None:
            return [other]
        checkpoint = open_checkpoint(place)
    except StorageError as error:
        return [Problem(key, f"{error.message}.", error.fix)]
    except ValueError as error:
        return [Problem(key, f"{error}.", fix)]
    if key == "checkpoint.resume" and not checkpoint.manifest.data_fingerprint:
        return [_weights_alone(key, asked)]
    try:
        saved = ModelConfig.model_validate(checkpoint.manifest.config.get("model", {}))
    except ValidationError:
        return [Problem(key, f"The manifest of {asked} does not say which model was saved.", fix)]
    return model_problems(f"{key}={asked}", asked, saved, config.model)


def _something_else(key: str, asked: str, place: str, fix: str) -> Problem | None:
    """What is there where no checkpoint is meant; None: a checkpoint, whole or damaged."""
    if is_url(place) and step_of(place.rstrip("/").rpartition("/")[2]) is not None:
        return None
    local = None if is_url(place) else Path(place)
    if local is not None and local.is_file():
        return Problem(key, f"{asked} is a file, not the folder of a checkpoint.", fix)
    found = None if local is not None and not local.is_dir() else find(place, "")
    if found is None:
        neither = "It is neither `auto` nor `never`, and there" if key == "checkpoint.resume" else "There"
        empty = local is not None and local.is_dir()
        return Problem(key, f"{asked} is an empty folder." if empty else f"{neither} is no folder {asked}.", fix)
    if found.is_checkpoint:
        return None
    newest = newest_complete(found.folder)
    a_run = local is not None and (local / "config.yaml").is_file()
    what = f"{asked} is {'the folder of a run' if a_run else 'a folder'}, not a checkpoint"
    if newest is None:
        return Problem(key, f"{what}, and there is no complete one in it.", fix)
    return Problem(key, f"{what}; the newest complete one in it is of step {newest.step}.", f"Set {key}={newest.path}")


def _weights_alone(key: str, asked: str) -> Problem:
    return Problem(
        key,
        f"{asked} holds weights alone: without optimizer and position in the data no run can go on.",
        f"To begin with its weights, set checkpoint.init_from={asked}",
    )
