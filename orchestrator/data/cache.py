"""The token cache: each split as one memory-mapped file, built once and found again by what it was built from.

`tokens/<fingerprint>/` holds `train.bin`, `validation.bin` and `meta.json`. It is built under a temporary name, flushed
and renamed, so it is there whole or not at all; ranks of a host wait for one builder, hosts that share it without
a working lock race harmlessly. The fingerprint covers the documents' names and contents, the tokenizer, the split and
the format, and no path. `known/` remembers which listing (names, sizes, times of change) had which fingerprint: an
unchanged corpus is not read again. An edit that keeps a file's size and time of change goes unnoticed, as in rsync.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from orchestrator.config.schema import DataConfig, RunConfig
from orchestrator.data.corpora import Listing, NotTextError, list_documents, not_text, read_pieces
from orchestrator.data.split import SPLITS, Part, Parts, Split, split_documents
from orchestrator.data.tokenizers import Tokenizer, open_tokenizer, token_type, tokenizer_identity
from orchestrator.errors import ConfigError, Problem

_FORMAT = 1
"""Raised whenever the same corpus and settings would give other tokens or other files."""
_BATCH_BYTES = 4 << 20
"""Text that is tokenised at a time."""
_CHECKED_BLOCKS, _BLOCK_BYTES = 512, 1 << 16
"""Blocks of a token file that its digest covers: all of it up to 32 MiB, evenly spaced ones beyond."""
_FRESH_SECONDS = 2.0
"""A file changed this recently may change again within one tick of its clock; its listing is not remembered."""
_ABANDONED_SECONDS = 24 * 3600.0
"""Age at which a builder's leftovers are taken to be those of a killed process."""


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """One split as built."""

    tokens: int
    """Tokens, each document's end-of-text included."""
    documents: int
    size_bytes: int
    """UTF-8 bytes of its text."""
    digest: str
    """Of the token file's checked blocks; finds truncated and overwritten files."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """`meta.json`: what the cache holds."""

    format: int
    fingerprint: str
    vocab_size: int
    end_of_text: int
    train: SplitFacts
    validation: SplitFacts
    skipped: tuple[str, ...]
    """Names of documents left out because they are not UTF-8 text (standard library only)."""

    def split(self, name: Split) -> SplitFacts:
        """The facts of one split."""
        return self.train if name == "train" else self.validation


@dataclass(frozen=True, slots=True)
class TokenCache:
    """A cache on disk that was found sound."""

    directory: Path
    facts: CacheFacts

    def tokens(self, split: Split) -> np.ndarray:
        """All tokens of a split, memory-mapped and read-only, shape [tokens]."""
        kind = token_type(self.facts.vocab_size)
        if not self.facts.split(split).tokens:
            return np.zeros(0, dtype=kind)  # an empty file cannot be mapped
        return np.memmap(self.directory / f"{split}.bin", dtype=kind, mode="r")


def cache_directory(data: DataConfig) -> Path:
    """The cache's folder: `data.cache_directory`, or `orchestrator` under XDG_CACHE_HOME or `~/.cache`."""
    if data.cache_directory:
        return Path(data.cache_directory).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "orchestrator"


def open_cache(config: RunConfig) -> TokenCache:
    """The token cache of the configuration's corpus, built now if it is not there. Any number of processes may call it.

    Raises ConfigError when the corpus, the tokenizer or the cache's folder cannot be used.
    """
    data = config.data
    listing = list_documents(data)
    if found := find_cache(config, listing):
        return found
    identity = tokenizer_identity(data.tokenizer)
    root = cache_directory(data)
    with _storage_problems(root):
        for folder in ("known", "tokens", "locks"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        parts, skipped = split_documents(listing, data.validation_fraction)
        fingerprint = _fingerprint(parts, identity, data)
        target = root / "tokens" / fingerprint
        with _lock(root / "locks" / fingerprint):
            cache = _open_sound(target) or _build(target, parts, skipped, open_tokenizer(data.tokenizer))
        _remember(_known(root, listing, identity, data), listing, fingerprint)
    return cache


def find_cache(config: RunConfig, listing: Listing) -> TokenCache | None:
    """The sound cache of a listing that was seen before, found without reading a document; None when there is none."""
    root = cache_directory(config.data)
    known = _known(root, listing, tokenizer_identity(config.data.tokenizer), config.data)
    fingerprint = _recall(known)
    return _open_sound(root / "tokens" / fingerprint) if fingerprint else None


def _build(target: Path, parts: Parts, skipped: tuple[str, ...], tokenizer: Tokenizer) -> TokenCache:
    """Write the cache under a temporary name and rename it to `target`, replacing an unsound one."""
    _remove_abandoned(target.parent)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        splits = {name: _write_split(building / f"{name}.bin", parts[name], tokenizer) for name in SPLITS}
        facts = CacheFacts(
            format=_FORMAT,
            fingerprint=target.name,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            train=splits["train"],
            validation=splits["validation"],
            skipped=skipped,
        )
        with (building / "meta.json").open("w", encoding="utf-8") as file:
            json.dump(asdict(facts), file)
            _flush(file.fileno())
        building.chmod(0o755)  # mkdtemp makes it private; other users of a shared cache may read it
        cache = _rename_into_place(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return cache or TokenCache(target, facts)


def _rename_into_place(building: Path, target: Path) -> TokenCache | None:
    """Rename, unless another builder was first: then its cache, if that is sound, else put ours in its place."""
    while True:
        try:
            building.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return None
        if found := _open_sound(target):
            return found
        broken = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        with contextlib.suppress(FileNotFoundError):
            target.rename(broken / "broken")
        shutil.rmtree(broken, ignore_errors=True)


def _write_split(path: Path, parts: tuple[Part, ...], tokenizer: Tokenizer) -> SplitFacts:
    """Write the parts' tokens, end-of-text after each part."""
    kind = token_type(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype=kind)
    tokens = 0
    with path.open("wb") as file:
        for batch in _batches(parts):
            ids_of_pieces = tokenizer.encode([piece for piece, _ in batch])
            for ids, (_, last_of_part) in zip(ids_of_pieces, batch, strict=True):
                file.write(ids.astype(kind, copy=False).tobytes())
                tokens += len(ids)
                if last_of_part:
                    file.write(end.tobytes())
                    tokens += 1
        _flush(file.fileno())
    return SplitFacts(tokens, len(parts), sum(part.end - part.start for part in parts), _file_digest(path))


def _batches(parts: tuple[Part, ...]) -> Iterator[list[tuple[bytes, bool]]]:
    """The parts' text in lists of about `_BATCH_BYTES`: (piece, whether it is its part's last)."""
    batch: list[tuple[bytes, bool]] = []
    size = 0
    for part in parts:
        at = part.start
        for piece in _read_unchanged(part):
            at += len(piece)
            size += len(piece)
            batch.append((piece, at == part.end))
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _read_unchanged(part: Part) -> Iterator[bytes]:
    """The part's text; refuses a file that has changed since it was listed, whose fingerprint would be another."""
    document = part.document
    try:
        yield from read_pieces(document, part.start, part.end)
    except NotTextError as error:
        raise ConfigError(not_text(error)) from None
    status = document.path.stat()
    if (status.st_size, status.st_mtime_ns) != (document.size_bytes, document.changed_ns):
        raise ConfigError(
            Problem("data.path", f"{document.path} changed while it was being read.", "Start again when it is done.")
        )


def _open_sound(directory: Path) -> TokenCache | None:
    """The cache in `directory`; None when it is absent, of another format, truncated or damaged."""
    try:
        values = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        splits = {name: SplitFacts(**values.pop(name)) for name in SPLITS}
        skipped = tuple(values.pop("skipped"))
        facts = CacheFacts(**values, train=splits["train"], validation=splits["validation"], skipped=skipped)
        item_bytes = np.dtype(token_type(facts.vocab_size)).itemsize
        for name in SPLITS:
            path = directory / f"{name}.bin"
            whole = path.stat().st_size == facts.split(name).tokens * item_bytes
            if not whole or _file_digest(path) != facts.split(name).digest:
                return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return TokenCache(directory, facts) if (facts.format, facts.fingerprint) == (_FORMAT, directory.name) else None


def _file_digest(path: Path) -> str:
    """Digest of the file's size and checked blocks."""
    size = path.stat().st_size
    blocks = -(-size // _BLOCK_BYTES)
    chosen = range(blocks) if blocks <= _CHECKED_BLOCKS else np.linspace(0, blocks - 1, _CHECKED_BLOCKS).astype(int)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for block in chosen:
            file.seek(int(block) * _BLOCK_BYTES)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _fingerprint(parts: Parts, identity: str, data: DataConfig) -> str:
    """Digest of everything that decides the tokens; 32 hexadecimal digits."""
    content = {
        "format": _FORMAT,
        "tokenizer": identity,
        "validation_fraction": data.validation_fraction,
        "splits": {name: [(part.digest, part.start, part.end) for part in parts[name]] for name in SPLITS},
    }
    return _digest(content)


def _known(root: Path, listing: Listing, identity: str, data: DataConfig) -> Path:
    """Where a listing's fingerprint is remembered: named by all that can be known without reading a document."""
    files = [(str(file.path), file.name, file.size_bytes, file.changed_ns) for file in listing.documents]
    key = _digest([_FORMAT, identity, data.validation_fraction, listing.skip_undecodable, files])
    return root / "known" / f"{key}.json"


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _recall(known: Path) -> str | None:
    """The fingerprint remembered for a listing."""
    try:
        value = json.loads(known.read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, str) else None


def _remember(known: Path, listing: Listing, fingerprint: str) -> None:
    """Store the listing's fingerprint, unless a file is so fresh that a further change might not show."""
    newest = max(document.changed_ns for document in listing.documents) / 1e9
    if time.time() - newest < _FRESH_SECONDS:
        return
    with tempfile.NamedTemporaryFile("w", dir=known.parent, delete=False, encoding="utf-8") as file:
        json.dump({"fingerprint": fingerprint}, file)
    Path(file.name).replace(known)


def _remove_abandoned(folder: Path) -> None:
    for leftover in folder.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that dies with its process. Where the file system has none, builders race, which is harmless."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _storage_problems(root: Path) -> Iterator[None]:
    """Turn what the file system says about the cache's folder into a problem that names the key."""
    try:
        yield
    except OSError as error:
        raise ConfigError(unwritable(root, error)) from None


def unwritable(root: Path, error: OSError) -> Problem:
    """The problem that a cache folder which cannot be written makes."""
    return Problem(
        "data.cache_directory",
        f"The token cache cannot be written in {root}: {error.strerror}.",
        "Set data.cache_directory to a folder that you can write and that has room for the tokens.",
    )
