"""What a job brings along: the current folder without what runs and tools make, and this package where it lies
elsewhere.

The size is known before anything is sent, by Ray's own rules (`.gitignore`, `.rayignore`, excludes), and refused with
the largest paths when it is no source any more. `jobs.py` sends it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, Problem

LIMIT_BYTES = 100 * 2**20
"""Above this it is data or results rather than source; Ray itself takes up to 500 MiB, through the head's memory."""
_MOST_FILES = 100_000
_NAMED = 5
_EXCLUDES = (
    ".git/", ".hg/", ".venv/", "venv/", "node_modules/", "__pycache__/", "*.egg-info/", ".ipynb_checkpoints/",
    ".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".hypothesis/", ".import_linter_cache/", ".tox/", ".cache/",
    "/runs/", "/outputs/", "/multirun/", "/mlruns/", "mlflow.db*", "*.ckpt", "*.safetensors",
)  # fmt: skip
"""Beside what the folder's own .gitignore and .rayignore leave out."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What would be sent of a folder."""

    folder: Path
    excludes: tuple[str, ...]
    sizes: Mapping[str, int]
    """Path relative to the folder -> bytes, of every file."""
    complete: bool
    """False when there were so many files that counting was given up."""

    @property
    def size_bytes(self) -> int:
        """All files together, before compression."""
        return sum(self.sizes.values())

    def holds(self, path: str) -> bool:
        """Whether a relative path, or something below it, is sent."""
        normal = Path(path).as_posix()
        return any(sent == normal or sent.startswith(f"{normal}/") for sent in self.sizes) or normal == "."


def measure(folder: Path) -> Upload:
    """What Ray would send of `folder`. Raises `ConfigError` when it cannot be read."""
    # Ray's own walk, so that what is measured is what is sent; pinned by `test_launch_ray_contract.py`.
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    environments = tuple(f"/{mark.parent.name}/" for mark in folder.glob("*/pyvenv.cfg"))
    excludes = (*_EXCLUDES, *environments)
    sizes: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
            if len(sizes) > _MOST_FILES:
                raise _TooManyError

    quiet = logging.getLogger("orchestrator.upload")
    quiet.disabled = True
    walk: Any = _dir_travel
    try:
        walk(folder, [_get_excludes(folder, list(excludes))], note, include_gitignore=True, logger=quiet)
    except _TooManyError:
        return Upload(folder, excludes, sizes, complete=False)
    except OSError as error:
        fix = "Name it in a .rayignore there, or submit from another folder."
        raise ConfigError(Problem("", f"{folder} cannot be uploaded: {error}.", fix)) from error
    return Upload(folder, excludes, sizes, complete=True)


class _TooManyError(Exception):
    """Counting is given up."""


def size_problem(upload: Upload, limit_bytes: int = LIMIT_BYTES) -> Problem | None:
    """Why the upload is too large, with what makes it so; None when it is not."""
    if upload.complete and upload.size_bytes <= limit_bytes:
        return None
    many = f"{len(upload.sizes):,} files" if upload.complete else f"more than {_MOST_FILES:,} files"
    largest = ", ".join(f"{path} ({_size(size)})" for path, size in largest_paths(upload))
    return Problem(
        "",
        f"the upload of {upload.folder} would be {_size(upload.size_bytes)} in {many}, more than "
        f"{_size(limit_bytes)}. Largest: {largest}.",
        "Name what the job does not need in a .rayignore there (the form of a .gitignore), put data on storage that "
        "the nodes share, or submit from another folder.",
    )


def largest_paths(upload: Upload) -> list[tuple[str, int]]:
    """The heaviest folders of the first two levels and files, none inside another that is named."""
    totals: dict[str, int] = {}
    for path, size in upload.sizes.items():
        parts = path.split("/")
        for depth in {1, min(2, len(parts))}:
            name = "/".join(parts[:depth]) + ("/" if depth < len(parts) else "")
            totals[name] = totals.get(name, 0) + size
    named: list[tuple[str, int]] = []
    for name, size in sorted(totals.items(), key=lambda item: (-item[1], item[0].count("/"), item[0])):
        if len(named) == _NAMED:
            break
        if not any(name.startswith(other) for other, _ in named if other.endswith("/")):
            named.append((name, size))
    return named


def package_folder() -> Path:
    """The folder that holds this package: a checkout, or an environment's site-packages."""
    return Path(__file__).resolve().parents[2]


def stage(upload: Upload, place: Path) -> None:
    """Copy what is to be sent into `place`, and beside it this package with the shipped configuration.

    For a folder that is not this package's own: Ray would put modules that are sent apart into folders of their own.
    """
    from orchestrator.config.locate import shipped_directory

    for path in upload.sizes:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(upload.folder / path, place / path)
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in ("orchestrator", "models"):
        shutil.copytree(package_folder() / package, place / package, ignore=leave_out, dirs_exist_ok=True)
    shutil.copytree(shipped_directory(), place / "orchestrator" / "conf", ignore=leave_out, dirs_exist_ok=True)


def _size(size_bytes: int) -> str:
    mebibytes = size_bytes / 2**20
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.1f} MiB"
