"""Which run is which: what changes what is learned, the name that follows, what may change on the way. Pure.

Speed and memory never enter a name: parallel degrees, micro-batch, recompute, compile, cluster, saving and tracking can
all change between two commands and it is still the same run. `run_directory.py` looks at the disk with these rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.urls import is_url
from orchestrator.errors import Problem

PLAN_PREFIX = "plan."
"""Of the parameters of an MLflow run that say what the plan decided; the others are the configuration's own keys."""

_HASH_CHARACTERS = 8
_NAME_BYTES = 200
"""Of a run's name, so that file systems (255 bytes) have room for a number behind it."""
_NO_FOLDER = re.compile(r"[/\\\x00-\x1f\x7f]")

_LEARNED = ("model", "training", "optimizer", "data")
"""Sections that change what is learned."""

_NOT_LEARNED = {
    "training": (
        "micro_batch_size",
        "activation_checkpointing",
        "compile",
        "deterministic",
        "validate_every_steps",
        "validation_sequences",
        "profile_steps",
        "profile_ranks",
    ),
    "data": ("cache_directory",),
}
"""Keys of learned sections that change speed, memory or what is looked at, never what is learned."""

_SAME_NAME = ("model.", "data.source", "data.path", "data.tokenizer", "data.validation_fraction")
"""A run's name stands for one model and one data set, whether a run of it has finished or not."""

_SAME_RUN = (*_SAME_NAME, "training.seed", "training.sequence_length", "optimizer.name")
"""What an unfinished run cannot go on without either: its place in the data or its saved moments lose their meaning."""


def learned_part(config: RunConfig) -> dict[str, Any]:
    """Everything of a configuration that changes what is learned, as plain values."""
    values = config.to_dict()
    part = {section: dict(values[section]) for section in _LEARNED}
    for section, keys in _NOT_LEARNED.items():
        for key in keys:
            del part[section][key]
    start = {"init_from": values["checkpoint"]["init_from"]}
    if starts_elsewhere(values):
        start["resume"] = values["checkpoint"]["resume"]
    part["start"] = start
    return part


def learned_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Of a configuration with dotted keys, those that change what is learned: `learned_part` where only texts are kept.

    Two runs that agree in them are the same training, whatever their plans.
    """
    learned = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section in _LEARNED and name.partition(".")[0] not in _NOT_LEARNED.get(section, ()):
            learned[key] = value
    learned["checkpoint.init_from"] = settings.get("checkpoint.init_from", "null")
    resume = settings.get("checkpoint.resume", "auto")
    learned["checkpoint.resume"] = "auto" if resume == "never" else resume
    return learned


def default_name(config: RunConfig) -> str:
    """The experiment's name and a short hash of all that changes what is learned."""
    text = json.dumps(learned_part(config), sort_keys=True, separators=(",", ":"))
    return f"{config.run.experiment}-{hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARACTERS]}"


def problems_of_asked_name(config: RunConfig) -> tuple[Problem, ...]:
    """Why the name that a configuration asks for cannot be that of a folder, whatever is on the disk."""
    name = config.run.name
    if name is None:
        return ()
    size = len(name.encode(errors="replace"))
    if 0 < size <= _NAME_BYTES and not name.startswith(".") and name == name.strip() and not _NO_FOLDER.search(name):
        return ()
    shown = repr(name if len(name) <= 40 else f"{name[:40]}...")
    return (
        Problem(
            "run.name",
            f"run.name={shown} cannot name a folder{f': it has {size} bytes' if size > _NAME_BYTES else ''}.",
            f"Use 1 to {_NAME_BYTES} bytes of UTF-8 without slash or line break, not starting with a dot, no blank at "
            "either end.",
        ),
    )


def checkpoint_directory(config: RunConfig, run_directory: str | os.PathLike[str]) -> str:
    """Path or URL of a run's checkpoints: `checkpoints/` in its own, or one of its name under `checkpoint.directory`.

    Several runs can share `checkpoint.directory`: none takes another's checkpoints for its own.
    """
    run = Path(run_directory)
    asked = config.checkpoint.directory
    if asked is None:
        return str(run / "checkpoints")
    if is_url(asked):
        return f"{asked.rstrip('/')}/{run.name}"
    return str(Path(asked).expanduser().absolute() / run.name)


def starts_elsewhere(values: Mapping[str, Any]) -> bool:
    """Whether a configuration (as plain values) names a checkpoint to start from."""
    return values.get("checkpoint", {}).get("resume", "auto") not in ("auto", "never")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay values. Empty mappings stay as they are."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now) of everything that differs; a missing key counts as None."""
    old, new = flatten(before), flatten(now)
    keys = sorted(old.keys() | new.keys())
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def problems_of_name(
    name: str, before: Mapping[str, Any], now: Mapping[str, Any], *, continues: bool
) -> tuple[Problem, ...]:
    """Why a run's name cannot be used for this configuration: one problem for each key that makes it another run.

    Args:
        name: the run's name.
        before: configuration that the run of that name was started with, as plain values.
        now: the configuration asked for.
        continues: whether that run is unfinished and would be continued.
    """
    fixed = _SAME_RUN if continues else _SAME_NAME
    return tuple(
        Problem(
            key,
            f"Run {name!r} was started with {key}={_shown(old)}, now {_shown(new)} is asked for: that would be another "
            "run under the same name.",
            f"Give another run.name, or set {key}={_shown(old)}.",
        )
        for key, (old, new) in changes_between(before, now).items()
        if key.startswith(fixed)
    )


def _shown(value: Any) -> str:
    return "null" if value is None else json.dumps(value) if isinstance(value, bool | list | dict) else str(value)
