"""Where the shipped configuration lies, and which options its groups offer.

Looks inside the installed package first and beside it (a checkout) second. Also refuses a foreign `models` package that
hides ours. Reads directory listings only; what the files say is `compose.py`'s business.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

from orchestrator.errors import ConfigError, Problem

GROUPS = (
    "experiment", "model", "cluster", "gpu", "parallel", "training", "optimizer", "data", "checkpoint", "tracking",
    "fault_tolerance", "run",
)  # fmt: skip
"""Every configuration group, in the order in which help lists them."""

PACKAGES = {group: group for group in GROUPS} | {"experiment": "", "gpu": "cluster.gpu"}
"""Dotted key under which the files of a group land; empty: at the root."""

_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent


@cache
def shipped_directory() -> Path:
    """The folder of the shipped YAML files. Raises ConfigError when the installation has none."""
    candidates = (_PACKAGE_DIRECTORY / "conf", _PACKAGE_DIRECTORY.parent / "conf")
    for candidate in candidates:
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(
        Problem(
            "",
            f"The configuration files are missing: neither {candidates[0]} nor {candidates[1]} holds a config.yaml.",
            "Install the package again, or run from a complete checkout.",
        )
    )


def option_file(group: str, option: str, config_directory: Path | None) -> Path | None:
    """The YAML file of a group's option, or None when there is no such option."""
    for directory in (shipped_directory(), config_directory):
        if directory is not None and (candidate := directory / group / f"{option}.yaml").is_file():
            return candidate
    return None


def options(group: str, config_directory: Path | None = None) -> list[str]:
    """Names that can be chosen for a group, sorted."""
    found = {file.stem for file in (shipped_directory() / group).glob("*.yaml")}
    if config_directory is not None:
        found |= {file.stem for file in (config_directory / group).glob("*.yaml")}
    return sorted(found)


def stamp(config_directory: Path | None) -> tuple[tuple[str, int], ...]:
    """When each file of the configuration was last written: changes whenever composing could give something else."""
    directories = [shipped_directory()] + ([config_directory] if config_directory is not None else [])
    return tuple(
        (entry.path, entry.stat().st_mtime_ns)
        for directory in directories
        for group in ("", *GROUPS)
        if (directory / group).is_dir()
        for entry in os.scandir(directory / group)
        if entry.name.endswith(".yaml")
    )


def comment_of(file: Path) -> str:
    """The first comment line of a YAML file that is not a Hydra directive: what the option is, in one sentence."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            return ""
        text = line.lstrip("# ").rstrip()
        if text and not text.startswith("@package"):
            return text
    return ""


def display(file: Path) -> str:
    """A file's path as messages show it: from `conf/` on for shipped files, in full for the user's own."""
    root = shipped_directory()
    return str(Path("conf") / file.relative_to(root)) if file.is_relative_to(root) else str(file)


def check_models_package() -> tuple[Problem, ...]:
    """A problem when `import models` would find another package than ours (nothing is imported here)."""
    spec = importlib.util.find_spec("models")
    ours = _PACKAGE_DIRECTORY.parent / "models"
    found = Path(spec.origin).resolve().parent if spec and spec.origin else None
    if found == ours.resolve():
        return ()
    what = f"`import models` finds {found}" if found else "`import models` finds nothing of ours"
    return (
        Problem(
            "",
            f"{what}, but this program needs its own package at {ours}.",
            "Run from another folder, or rename the `models` package that hides it (look at PYTHONPATH, too).",
        ),
    )
