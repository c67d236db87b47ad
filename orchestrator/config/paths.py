"""Paths of a configuration made absolute where the command was typed. Pure.

Ranks may start in another folder or on another machine, where a relative path would mean something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.urls import is_url

_PATHS: dict[str, tuple[str, ...]] = {
    "run.directory": (),
    "data.path": (),
    "data.tokenizer": ("bytes",),
    "data.cache_directory": (),
    "checkpoint.directory": (),
    "checkpoint.resume": ("auto", "never"),
    "checkpoint.init_from": (),
}
"""Dotted key -> words that are no path."""


def with_absolute_paths(config: RunConfig, current_folder: Path) -> RunConfig:
    """The same configuration with every path absolute, `~` written out; globs and URLs stay as they are.

    Args:
        config: as composed.
        current_folder: of the command; absolute.
    """
    changes: dict[str, dict[str, Any]] = {}
    for dotted, words in _PATHS.items():
        section, key = dotted.split(".")
        value = getattr(getattr(config, section), key)
        if value is not None and value not in words and not is_url(value):
            changes.setdefault(section, {})[key] = str(current_folder / Path(value).expanduser())
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in changes.items()}
    )
