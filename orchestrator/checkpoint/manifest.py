"""The manifest of a checkpoint: what it is, where it comes from, and every file with its size and checksum. Pure.

It is written last, before the one rename that commits a checkpoint; a folder without a readable manifest, or whose
files differ from it, is not a checkpoint. Reading, judging and naming live here; tensors are written in `write.py`.
`describe` builds the facts that the engine hands over, `problems_of_resuming` says why a run must not go on from one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.errors import Problem
from orchestrator.plan.run_plan import RunPlan

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
CHECKSUM = "sha256"
"""About 1.4 GiB/s on one core with the CPU's SHA instructions, and hashlib releases the interpreter's lock."""

_STEP_NAME = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES = 1 << 20
_PACKAGES = ("torch", "ray", "numpy", "mlflow", "pydantic", "tokenizers")


def step_name(step: int) -> str:
    """Folder name of the checkpoint of a step: `step-00000200`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder name stands for, or None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match and step_name(int(match.group(1))) == name else None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint's folder, with forward slashes."""
    size_bytes: int
    checksum: str
    """Hexadecimal digest of the whole file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known about a committed checkpoint without reading a tensor."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on so far."""
    seed: int
    data_fingerprint: str
    """Fingerprint of the token cache that the run learns from (corpus, tokenizer, split)."""
    data_position: dict[str, Any]
    """Where the data order stands, in the terms of `data/order.py`."""
    parallel: dict[str, Any]
    """Degrees of the plan that wrote it (`RunPlan.parallel`)."""
    mesh: tuple[dict[str, Any], ...]
    """Every rank with its coordinates and place (`RunPlan.ranks`)."""
    config: dict[str, Any]
    """The whole configuration of the run that wrote it."""
    versions: dict[str, str]
    """Python and package versions, ours included."""
    files: tuple[FileRecord, ...] = ()
    checksum: str = CHECKSUM
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def size_bytes(self) -> int:
        """All files together, the manifest apart."""
        return sum(record.size_bytes for record in self.files)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n"


def manifest_from_dict(values: Mapping[str, Any]) -> Manifest:
    """Read a manifest back.

    Raises:
        ValueError: a newer schema, or a field missing or unknown.
    """
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"manifest schema version {version!r}, this code reads {SCHEMA_VERSION}")
    try:
        fields = dict(values)
        fields["files"] = tuple(FileRecord(**record) for record in fields["files"])
        fields["mesh"] = tuple(fields["mesh"])
        return Manifest(**fields)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a checkpoint manifest: {error}") from None


@cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a checkpoint depends on; those not installed are left out.

    Read once: it looks into files, and a step waits for it.
    """
    found = {"python": platform.python_version()}
    for package in ("orchestrator", *_PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe(
    plan: RunPlan, *, step: int, tokens: int, data_fingerprint: str, data_position: Mapping[str, Any]
) -> Manifest:
    """The facts of a checkpoint about to be written; the writer adds the files.

    Args:
        plan: the plan that runs, with its configuration.
        step: optimizer steps done.
        tokens: tokens trained on so far.
        data_fingerprint: `TokenDataset.fingerprint` of the training split.
        data_position: plain JSON values from which the data order goes on.
    """
    facts = plan.to_dict()
    return Manifest(
        step=step,
        tokens=tokens,
        seed=plan.config.training.seed,
        data_fingerprint=data_fingerprint,
        data_position=dict(data_position),
        parallel=facts["parallel"] or {},
        mesh=tuple(facts["ranks"]),
        config=facts["config"],
        versions=dict(package_versions()),
    )


def checksum_file(path: Path) -> str:
    """Digest of a file, read in chunks."""
    digest = hashlib.new(CHECKSUM)
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def record_file(folder: Path, relative: str) -> FileRecord:
    """Size and digest of one file of a checkpoint."""
    path = folder / relative
    return FileRecord(relative, path.stat().st_size, checksum_file(path))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        ValueError: it is missing, unreadable or of another schema; the message says which.
    """
    path = folder / MANIFEST_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST_NAME} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST_NAME} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{MANIFEST_NAME} is not a JSON object")
    return manifest_from_dict(values)


def faults_of(
    folder: Path, manifest: Manifest, *, read_bytes: bool, records: Iterable[FileRecord] | None = None
) -> list[str]:
    """What of a folder differs from its manifest, one line a file; empty when all is there.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        read_bytes: also compare checksums, which reads every byte; otherwise names and sizes only.
        records: the files to look at; None means all of them.
    """
    faults = []
    for record in manifest.files if records is None else records:
        path = folder / record.path
        try:
            size_bytes = path.stat().st_size
            if size_bytes != record.size_bytes:
                faults.append(f"{record.path} has {size_bytes} bytes, its manifest says {record.size_bytes}")
            elif read_bytes and checksum_file(path) != record.checksum:
                faults.append(f"{record.path} has another {CHECKSUM} than its manifest says: its bytes have changed")
        except FileNotFoundError:
            faults.append(f"{record.path} is missing")
        except OSError as error:
            faults.append(f"{record.path} cannot be read ({error})")
    return faults


def problems_of_resuming(manifest: Manifest, *, data_fingerprint: str) -> tuple[Problem, ...]:
    """Why a run must not go on from a checkpoint: other data than it was trained on.

    A changed learning rate, batch or plan is no problem; the run's folder records it.
    """
    if manifest.data_fingerprint == data_fingerprint:
        return ()
    return (
        Problem(
            "data",
            f"The checkpoint of step {manifest.step} was trained on data with fingerprint {manifest.data_fingerprint}, "
            f"the data now has {data_fingerprint}: the text, the tokenizer or the split has changed, so its position "
            "in the data means nothing.",
            "Restore the data, or start a new run from its weights with another run.name and checkpoint.init_from.",
        ),
    )
