"""`model=FOLDER`: the sizes of a model that lies on disk, from a Hugging Face `config.json` or a checkpoint's manifest.

Reads one small file and no weights. Every key that is unknown, missing or asks for what is not implemented is named;
nothing is left to our own defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from models.registry import FAMILIES, family_of_model_type
from orchestrator.config.schema.model import ModelConfig

CONFIG_NAME = "config.json"
MANIFEST_NAME = "manifest.json"


class FolderError(ValueError):
    """A folder cannot be used; `faults` is one line for each reason."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


def means_folder(option: str) -> bool:
    """Whether the value of `model=` is a path rather than the name of an option."""
    return "/" in option or Path(option).expanduser().is_dir()


def model_of(path: Path) -> ModelConfig:
    """The model of a Hugging Face folder (or of its `config.json`), or of one of our checkpoints.

    Raises FolderError with everything that stands against it.
    """
    file = path if path.is_file() and path.suffix == ".json" else path / CONFIG_NAME
    if not path.exists():
        raise FolderError(["it does not exist, and nothing is downloaded"])
    if (path / MANIFEST_NAME).is_file():
        saved = read_json(path / MANIFEST_NAME).get("config")
        if not isinstance(saved, dict) or "model" not in saved:
            raise FolderError([f"{MANIFEST_NAME} does not say which model was saved"])
        return _validated(saved["model"], MANIFEST_NAME)
    return read_sizes(read_json(file))


def read_sizes(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a Hugging Face `config.json` describes.

    Raises FolderError naming every key that is unknown, missing or asks for what is not implemented.
    """
    kind = config.get("model_type")
    found = family_of_model_type(kind)
    if found is None:
        known = ", ".join(name for one in FAMILIES.values() for name in one.model_types)
        raise FolderError([f"{CONFIG_NAME}: model_type={kind!r} is not implemented; there are {known}"])
    imported = found.sizes_from_config(config)
    if imported.refused:
        raise FolderError(f"{CONFIG_NAME}: {key} {reason}" for key, reason in imported.refused)
    return _validated(imported.sizes, CONFIG_NAME)


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file. Raises FolderError when it is missing or is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FolderError([f"{path.name} is missing"]) from None
    except OSError as error:
        raise FolderError([f"{path.name} cannot be read ({error})"]) from None
    return json_object(path.name, data)


def json_object(name: str, data: bytes) -> dict[str, Any]:
    """The object that the bytes of a JSON file of that name hold. Raises FolderError when they hold none."""
    try:
        values = json.loads(data)
    except ValueError as error:
        raise FolderError([f"{name} cannot be read ({error})"]) from None
    if not isinstance(values, dict):
        raise FolderError([f"{name} is no JSON object"])
    return values


def _validated(sizes: object, file: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(sizes)
    except ValidationError as error:
        raise FolderError(
            f"{file}: {'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()
        ) from None
