"""Which documents are kept for validation: decided by each document's own name and content, never by its position.

Adding a document moves no other one between the splits (but for the rule that neither split is empty). A corpus of a
single document is cut in two behind a line's end. Inside a split the documents are in the order of their digests, so
that the first windows are a fair sample of the whole.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.data.corpora import Document, Listing, NotTextError, line_start_before, not_text, read_pieces
from orchestrator.errors import ConfigError, Problem

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

_REPORTED = 5
"""Files named one by one when many are not text."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one split takes of a document: all of it, or a stretch of a corpus's only one."""

    document: Document
    digest: str
    """`document_digest` of the whole document."""
    start: int
    """First byte."""
    end: int
    """Byte after the last."""


Parts = dict[Split, tuple[Part, ...]]
"""The parts of each split, in order."""


def document_digest(document: Document) -> str:
    """32 hexadecimal digits that stand for a document's name and content. Raises as `read_pieces`."""
    digest = hashlib.blake2b(document.name.encode("utf-8", errors="surrogateescape") + b"\0", digest_size=16)
    for piece in read_pieces(document):
        digest.update(piece)
    return digest.hexdigest()


def split_documents(listing: Listing, validation_fraction: float) -> tuple[Parts, tuple[str, ...]]:
    """Read every document; the parts of each split, and the names of those left out as undecodable.

    Raises ConfigError naming the files that are not text, or when nothing is left.
    """
    parts: list[Part] = []
    skipped: list[str] = []
    problems: list[Problem] = []
    for document in listing.documents:
        try:
            digest = document_digest(document)
        except NotTextError as error:
            skipped.append(document.name)
            problems.append(not_text(error))
            continue
        parts.append(Part(document, digest, 0, document.size_bytes))
    if problems and not listing.skip_undecodable:
        raise ConfigError(_first(problems))
    if not parts:
        raise ConfigError(Problem(listing.key, f"{listing.origin} holds no text.", "Choose another corpus."))
    if len(parts) == 1:
        return _cut(parts[0], validation_fraction), tuple(skipped)
    return _choose(parts, validation_fraction), tuple(skipped)


def _choose(parts: list[Part], validation_fraction: float) -> Parts:
    """A document is for validation when its digest, read as a number from 0 to 1, lies below the fraction."""
    ordered = sorted(parts, key=lambda part: part.digest)
    count = sum(int(part.digest, 16) / 16**32 < validation_fraction for part in ordered)
    if validation_fraction > 0:
        count = min(max(count, 1), len(ordered) - 1)
    return {"validation": tuple(ordered[:count]), "train": tuple(ordered[count:])}


def _cut(part: Part, validation_fraction: float) -> Parts:
    """The end of the only document is for validation, from behind the nearest line's end before the cut."""
    if validation_fraction == 0:
        return {"train": (part,), "validation": ()}
    cut = line_start_before(part.document, int(part.end * (1 - validation_fraction)))
    train = replace(part, end=cut)
    validation = replace(part, start=cut)
    return {"train": (train,) if cut else (), "validation": (validation,) if cut < part.end else ()}


def _first(problems: list[Problem]) -> list[Problem]:
    more = len(problems) - _REPORTED
    if more <= 0:
        return problems
    return [*problems[:_REPORTED], Problem("data.path", f"{more:,} more files are not UTF-8 text.", problems[0].fix)]
