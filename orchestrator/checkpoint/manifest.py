"""The manifest of a checkpoint: what it is, where it comes from, and every file with its size and checksum. No torch.

It is written last, before the one rename that commits a checkpoint (in an object store it is the commit); a folder
without a readable manifest, or whose files differ from it, is not a checkpoint. Reading, judging and naming live here;
tensors are written in `write.py`. `describe` builds the facts that the engine hands over, `problems_of_resuming` says
why a run must not go on from one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash
from pydantic import TypeAdapter, ValidationError

from orchestrator.checkpoint.storage import Folder, StorageError
from orchestrator.errors import Problem
from orchestrator.plan.run_plan import RunPlan

SCHEMA_VERSION = 2
_READABLE_VERSIONS = (1, 2)
MANIFEST_NAME = "manifest.json"
CHECKSUM = "xxh3_128"
"""Finds any accidental change at the speed of memory, about 7 GiB/s on one core against SHA-256's 1; it does not guard
against forgery. It runs beside the writing, without the interpreter's lock."""
_DIGESTS: dict[str, Callable[[], Digest]] = {CHECKSUM: xxhash.xxh3_128, "sha256": hashlib.sha256}
"""By the name in a manifest; SHA-256 is read only."""

_STEP_NAME = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES = 8 << 20
_PACKAGES = ("torch", "ray", "numpy", "mlflow", "pydantic", "tokenizers")


class Digest(Protocol):
    """What computes a checksum, piece by piece."""

    def update(self, data: Any, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far."""


def new_digest(algorithm: str = CHECKSUM) -> Digest:
    """A checksum to be computed. Raises ValueError for an algorithm that is not known."""
    if algorithm not in _DIGESTS:
        raise ValueError(f"its checksums are {algorithm!r}, this code knows {', '.join(_DIGESTS)}")
    return _DIGESTS[algorithm]()


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
    """Python and package versions, ours included, and `code`: a hash of this project's source."""
    loss: float | None = None
    """Training loss of the step."""
    validation_loss: float | None = None
    """Validation loss of exactly this step; None where it was not validated."""
    best_validation_loss: float | None = None
    """Lowest validation loss of the run up to this step."""
    saved_at: float | None = None
    """`time.time()` when the state was copied."""
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
        ValueError: a newer schema, or a field that is missing, unknown or of another type.
    """
    version = values.get("schema_version")
    if version not in _READABLE_VERSIONS:
        raise ValueError(f"manifest schema version {version!r}, this code reads {SCHEMA_VERSION}")
    try:
        fields = dict(values)
        fields["files"] = tuple(FileRecord(**record) for record in fields["files"])
        fields["mesh"] = tuple(fields["mesh"])
        manifest = Manifest(**fields)
        _types().validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
        raise ValueError(f"not a checkpoint manifest: {wrong}") from None
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a checkpoint manifest: {error}") from None
    return manifest


@cache
def _types() -> TypeAdapter[Manifest]:
    """The types of a manifest's fields: what is edited by hand may have any."""
    return TypeAdapter(Manifest)


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
    found["code"] = _source_hash()
    return found


def _source_hash() -> str:
    """Short hash of this project's Python source, so that two checkpoints show whether one code wrote both."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in (package, package.parent / "models"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(package.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses that a checkpoint knows; None: not known."""

    training: float | None = None
    validation: float | None = None
    """Of exactly the checkpoint's step."""
    best_validation: float | None = None


def describe(
    plan: RunPlan,
    *,
    step: int,
    tokens: int,
    data_fingerprint: str,
    data_position: Mapping[str, Any],
    losses: Losses | None = None,
) -> Manifest:
    """The facts of a checkpoint about to be written; the writer adds the files.

    Args:
        plan: the plan that runs, with its configuration.
        step: optimizer steps done.
        tokens: tokens trained on so far.
        data_fingerprint: `TokenDataset.fingerprint` of the training split.
        data_position: plain JSON values from which the data order goes on.
        losses: what is known of them.
    """
    facts = plan.to_dict()
    losses = losses or Losses()
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
        loss=losses.training,
        validation_loss=losses.validation,
        best_validation_loss=losses.best_validation,
        saved_at=time.time(),
    )


def checksum_of(stream: BinaryIO, algorithm: str = CHECKSUM) -> str:
    """Digest of a file from its beginning to its end, read in chunks."""
    digest = new_digest(algorithm)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
    return digest.hexdigest()


def record_file(folder: Folder, relative: str) -> FileRecord:
    """Size and digest of one file of a checkpoint, by reading it."""
    with folder.open(relative) as stream:
        return FileRecord(relative, folder.size_bytes(relative), checksum_of(stream))


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        ValueError: it is missing, unreadable or of another schema; the message says which.
        StorageError: an object store does not answer: nothing is known then.
    """
    try:
        values = json.loads(folder.read(MANIFEST_NAME))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{MANIFEST_NAME} is missing") from None
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST_NAME} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{MANIFEST_NAME} is not a JSON object")
    return manifest_from_dict(values)


def faults_of(
    folder: Folder, manifest: Manifest, *, read_bytes: bool, records: Iterable[FileRecord] | None = None
) -> list[str]:
    """What of a folder differs from its manifest, one line a file; empty when all is there.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        read_bytes: also compare checksums, which reads every byte; otherwise names and sizes only.
        records: the files to look at; None means all of them.

    Raises:
        StorageError: an object store does not answer: nothing is known then.
    """
    there = folder.files()
    found = (
        _fault_of(folder, record, there.get(record.path), manifest.checksum if read_bytes else None)
        for record in (manifest.files if records is None else records)
    )
    return [fault for fault in found if fault is not None]


def _fault_of(folder: Folder, record: FileRecord, size_bytes: int | None, checksum: str | None) -> str | None:
    """What is wrong with one file; its bytes are read when the kind of checksum is given."""
    if size_bytes is None:
        return f"{record.path} is missing"
    if size_bytes != record.size_bytes:
        return f"{record.path} has {size_bytes} bytes, its manifest says {record.size_bytes}"
    if checksum is None:
        return None
    try:
        with folder.open(record.path) as stream:
            if checksum_of(stream, checksum) != record.checksum:
                return f"{record.path} has another {checksum} than its manifest says: its bytes have changed"
    except FileNotFoundError:
        return f"{record.path} is missing"
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        return f"{record.path} cannot be read ({error})"
    return None


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
