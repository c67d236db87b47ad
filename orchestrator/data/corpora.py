"""Where documents come from: Python's standard library, or text files of the user's.

Lists documents without reading them (name, size, time of change) and reads one at a time as checked UTF-8. Names are
relative, so that nothing downstream depends on where a machine keeps its files. Refuses what is not text with the file
and the byte; random tokens (`data.source=synthetic`) have no documents and live in `dataset.py`. Next: `cache.py`.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.schema import DataConfig
from orchestrator.errors import ConfigError, Problem

PIECE_BYTES = 1 << 20
"""Bytes read at a time. Part of what a tokenizer.json's tokens are, since no token crosses from piece to piece."""
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
)
"""Not the library itself, or tests, which many distributions leave out: so the corpus is alike everywhere."""
_STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
"""Written when this Python was built or installed: they hold paths of the machine."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file of a corpus, not yet read."""

    name: str
    """Path relative to the corpus, with forward slashes; the same on every machine."""
    path: Path
    size_bytes: int
    changed_ns: int
    """Time of the last change, in nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The documents of a corpus, by name."""

    origin: str
    """What the corpus is, for messages: `Python's standard library`, or the path as the user gave it."""
    key: str
    """Configuration key that chose it."""
    documents: tuple[Document, ...]
    skip_undecodable: bool
    """Whether a file that is not UTF-8 text is left out (standard library) or refused (the user's own files)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all documents together."""
        return sum(document.size_bytes for document in self.documents)

    def describe(self) -> str:
        """One line: what it is, how many documents and bytes."""
        return f"{self.origin}: {len(self.documents):,} documents, {self.size_bytes:,} bytes"


class NotTextError(ValueError):
    """A document is not UTF-8 text; the message says where and why."""


def list_documents(data: DataConfig) -> Listing:
    """The documents of `data.source`, sorted by name; empty files are no documents.

    Raises ConfigError when the path is missing, cannot be read or holds no text.
    """
    if data.source == "synthetic":
        raise ValueError("synthetic tokens have no documents")
    listing = _list_stdlib() if data.source == "python_stdlib" else _list_text(data.path)
    if not listing.documents:
        raise ConfigError(
            Problem(
                listing.key,
                f"{listing.origin} holds no document that is not empty.",
                "Point data.path at a text file, a folder or a glob with text in it, or use data.source=python_stdlib.",
            )
        )
    return listing


def read_pieces(document: Document, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The document's bytes from `start` to before `end`, checked to be UTF-8 text, in pieces of about a megabyte.

    A piece ends behind a line's end (behind a character, in a line longer than a piece), so memory stays bounded and
    pieces can be tokenised one by one. Raises NotTextError with the first bad byte's offset, ConfigError when the file
    cannot be read.
    """
    end = document.size_bytes if end is None else end
    try:
        with document.path.open("rb") as file:
            file.seek(start)
            kept = b""
            while start + len(kept) < end:
                read = file.read(min(PIECE_BYTES, end - start - len(kept)))
                content = kept + read
                last = not read or start + len(content) >= end
                piece = content if last else content[: _end_of_piece(content)]
                check_text(piece, document.path, start)
                if piece:
                    yield piece
                start, kept = start + len(piece), content[len(piece) :]
                if not read:
                    return
    except OSError as error:
        raise ConfigError(unreadable(document.path, error)) from None


def line_start_before(document: Document, offset: int) -> int:
    """Offset behind the last line's end before `offset`; in a text of one line, that of the character at `offset`."""
    try:
        with document.path.open("rb") as file:
            high = offset
            while high > 0:
                low = max(0, high - PIECE_BYTES)
                file.seek(low)
                found = file.read(high - low).rfind(b"\n")
                if found >= 0:
                    return low + found + 1
                high = low
            low = max(0, offset - 3)  # a UTF-8 character has at most three bytes behind its first
            file.seek(low)
            around = file.read(offset - low + 1)
    except OSError as error:
        raise ConfigError(unreadable(document.path, error)) from None
    while offset > low and around[offset - low] & 0xC0 == 0x80:
        offset -= 1
    return offset


def _end_of_piece(content: bytes) -> int:
    """Where a piece of `content`, behind which more follows, ends."""
    line_end = content.rfind(b"\n") + 1
    if line_end:
        return line_end
    end = len(content)
    while end > len(content) - 3 and content[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1  # the last character may go on behind what was read


def check_text(content: bytes, path: Path, offset: int = 0, *, complete: bool = True) -> None:
    """Raise NotTextError unless `content`, read at `offset`, is UTF-8; not `complete`: it may end in a character."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        cut_off = not complete and error.reason == "unexpected end of data"
        if not cut_off:
            raise NotTextError(
                f"{path} is not UTF-8 text: byte {offset + error.start} is 0x{content[error.start]:02x} "
                f"({error.reason})."
            ) from None
    if (zero := content.find(b"\0")) >= 0:
        # Valid in UTF-8, yet never part of text: a binary file, or UTF-16.
        raise NotTextError(f"{path} is not UTF-8 text: byte {offset + zero} is 0x00, as in binary files and UTF-16.")


def not_text(error: NotTextError) -> Problem:
    """The problem that a file which is not text makes."""
    return Problem(
        "data.path",
        str(error),
        "Convert the file to UTF-8 (iconv -f ENCODING -t UTF-8), move it out, or choose only the text files with a "
        "glob such as 'folder/**/*.txt'.",
    )


def unreadable(path: Path, error: OSError) -> Problem:
    """The problem that a file or folder which cannot be read makes."""
    return Problem("data.path", f"{path} cannot be read: {error.strerror}.", "Change its permissions or the path.")


def _list_stdlib() -> Listing:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path, entry in _walk(root, _STDLIB_SKIPPED_FOLDERS):
        if path.suffix == ".py" and not path.name.startswith(_STDLIB_SKIPPED_FILES):
            documents.append(_document(path, root, entry))
    return Listing("Python's standard library", "data.source", _sorted(documents), skip_undecodable=True)


def _list_text(path: str | None) -> Listing:
    if not path:
        raise ConfigError(
            Problem(
                "data.path", "data.source=text needs a path, none is given.", "Set it to a file, a folder or a glob."
            )
        )
    given = Path(path).expanduser()
    if given.is_dir():
        found = [_document(file, given, entry) for file, entry in _walk(given, frozenset())]
    elif given.exists():
        found = [_document(given, given.parent, given.stat())]
    elif glob.has_magic(path):
        root = _glob_root(given)
        matches = map(Path, glob.iglob(str(given), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute one
        found = [_document(match, root, match.stat()) for match in matches if match.is_file()]
        if not found:
            raise ConfigError(
                Problem("data.path", f"No file matches {given.absolute()}.", "Check the pattern; ** crosses folders.")
            )
    else:
        raise ConfigError(_missing(given))
    return Listing(path, "data.path", _sorted(found), skip_undecodable=False)


def _missing(given: Path) -> Problem:
    absolute = given.absolute()
    parent = next(folder for folder in absolute.parents if folder.exists())
    return Problem(
        "data.path",
        f"{absolute} does not exist ({parent} does).",
        "Set data.path to a file, a folder or a glob that exists; a relative path starts at the current folder.",
    )


def _glob_root(pattern: Path) -> Path:
    """The part of a glob before its first wildcard."""
    parts = pattern.parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:fixed]) if fixed else Path()


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Files below `root`, hidden ones left out; a linked folder is followed, but none is entered twice."""

    def fail(error: OSError) -> None:
        raise ConfigError(unreadable(Path(error.filename), error))

    entered: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=fail):
        real = os.path.realpath(folder)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path, path.stat()


def _document(path: Path, root: Path, status: os.stat_result) -> Document:
    return Document(path.relative_to(root).as_posix(), path.absolute(), status.st_size, status.st_mtime_ns)


def _sorted(documents: list[Document]) -> tuple[Document, ...]:
    return tuple(
        sorted((document for document in documents if document.size_bytes), key=lambda document: document.name)
    )
