"""Whether the checkpoint that a configuration starts from can be used, found out before anything starts. No torch.

Names and sizes of its files and its model are compared; every byte is verified by the ranks when they load it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from orchestrator.checkpoint.folder import open_checkpoint
from orchestrator.checkpoint.huggingface_folder import FETCH, is_huggingface, model_problems
from orchestrator.checkpoint.huggingface_start import problems_of_weights
from orchestrator.checkpoint.storage import StorageError
from orchestrator.config.schema import ModelConfig, RunConfig
from orchestrator.config.urls import is_url
from orchestrator.errors import Problem


def check_start(config: RunConfig) -> tuple[Problem, ...]:
    """Every reason against `checkpoint.resume=PATH` and `checkpoint.init_from`."""
    problems: list[Problem] = []
    if config.checkpoint.resume not in ("auto", "never"):
        problems += _problems_of(config, "checkpoint.resume", config.checkpoint.resume)
    if config.checkpoint.init_from is not None:
        problems += _problems_of(config, "checkpoint.init_from", config.checkpoint.init_from)
    return tuple(problems)


def _problems_of(config: RunConfig, key: str, asked: str) -> list[Problem]:
    place = asked if is_url(asked) else str(Path(asked).expanduser())
    words = "`auto`, `never` or " if key == "checkpoint.resume" else ""
    fix = f"Give {words}the folder of a checkpoint, for example RUN/checkpoints/step-00000200."
    if key == "checkpoint.init_from":
        fix = f"{fix[:-1]}, or a Hugging Face folder; nothing is downloaded: {FETCH}."
    try:
        if is_huggingface(place):
            return problems_of_weights(config, place) if key == "checkpoint.init_from" else [_weights_alone(key, asked)]
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


def _weights_alone(key: str, asked: str) -> Problem:
    return Problem(
        key,
        f"{asked} holds weights alone: without optimizer and position in the data no run can go on.",
        f"To begin with its weights, set checkpoint.init_from={asked}",
    )
