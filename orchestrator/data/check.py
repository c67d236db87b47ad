"""Everything that is wrong with the data, found before anything starts.

Quick for any corpus: what is cached is not read again; one of up to 32 MiB is read whole, so what is said of it is
exact; of a larger one the listing, the tokenizer and the beginnings of some files are looked at, and the rest is
refused with the same words when the cache is built. Writes nothing but the cache's empty folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from orchestrator.config.schema import RunConfig
from orchestrator.data.cache import cache_directory, find_cache, unwritable
from orchestrator.data.corpora import (
    Listing,
    NotTextError,
    check_text,
    list_documents,
    not_text,
    read_pieces,
    unreadable,
)
from orchestrator.data.dataset import too_small_problem, vocabulary_problem
from orchestrator.data.split import SPLITS, Part, Split, split_documents
from orchestrator.data.tokenizers import BYTES, Tokenizer, open_tokenizer
from orchestrator.errors import ConfigError, Problem

Result = TypeVar("Result")

_WHOLE_BYTES = 32 << 20
"""Corpora up to this size are read whole."""
_ENCODED_BYTES = 1 << 20
"""Splits up to this size are tokenised with a tokenizer.json; counting the tokens of more takes too long here."""
_LOOKED_AT_FILES, _LOOKED_AT_BYTES = 256, 1 << 16
"""Of a larger corpus: files, evenly spaced, of which the beginning is looked at."""


def check_data(config: RunConfig) -> tuple[Problem, ...]:
    """All problems of `data.*`, and of its fit to the model and the sequence length; empty when there is none."""
    problems = [*_contradictions(config)]
    if config.data.source == "synthetic":
        return tuple(problems)
    tokenizer = _collect(problems, lambda: open_tokenizer(config.data.tokenizer))
    if tokenizer and tokenizer.vocab_size > config.model.vocab_size:
        problems.append(vocabulary_problem(config, tokenizer.vocab_size))
    problems.extend(_check_folder(cache_directory(config.data)))
    missing_path = config.data.source == "text" and not config.data.path
    listing = None if missing_path else _collect(problems, lambda: list_documents(config.data))
    if listing and tokenizer and (cache := find_cache(config, listing)):
        tokens = {split: cache.facts.split(split).tokens for split in SPLITS}
        problems.extend(_check_sizes(config, tokens))
    elif listing and listing.size_bytes <= _WHOLE_BYTES:
        parts = _collect(problems, lambda: split_documents(listing, config.data.validation_fraction)[0])
        if parts and tokenizer:
            problems.extend(_check_sizes(config, {split: _count(parts[split], tokenizer) for split in SPLITS}))
    elif listing and not listing.skip_undecodable:
        problems.extend(_look_at(listing))
    return tuple(problems)


def _contradictions(config: RunConfig) -> list[Problem]:
    """Keys of `data` that the source makes necessary or meaningless."""
    data = config.data
    problems = []
    if data.source == "text" and not data.path:
        problems.append(
            Problem(
                "data.path",
                "data.source=text reads files, but data.path is not set.",
                "Set it to a file, a folder or a glob.",
            )
        )
    if data.source != "text" and data.path:
        problems.append(
            Problem(
                "data.path",
                f"data.path={data.path} was given, but data.source={data.source} does not read it.",
                "Set data.source=text to train on it, or leave data.path out.",
            )
        )
    if data.source == "synthetic" and data.tokenizer != BYTES:
        problems.append(
            Problem(
                "data.tokenizer",
                f"data.tokenizer={data.tokenizer} was given, but data.source=synthetic draws random ids of "
                "model.vocab_size and uses no tokenizer.",
                "Leave data.tokenizer out, or choose data.source=text.",
            )
        )
    if data.validation_fraction == 0 and config.training.validate_every_steps and data.source != "synthetic":
        problems.append(
            Problem(
                "data.validation_fraction",
                f"training.validate_every_steps={config.training.validate_every_steps} asks for validations, but "
                "data.validation_fraction=0 keeps no document for them.",
                "Set data.validation_fraction to 0.05 or so, or training.validate_every_steps=0.",
            )
        )
    return problems


def _collect(problems: list[Problem], step: Callable[[], Result]) -> Result | None:
    """The step's result; None when it is refused, its problems then join the others."""
    try:
        return step()
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _check_folder(root: Path) -> list[Problem]:
    """Prove that the cache can be written, by writing; the answer of permission bits alone is not reliable."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return []
    except OSError as error:
        return [unwritable(root, error)]


def _check_sizes(config: RunConfig, tokens: Mapping[Split, int | None]) -> list[Problem]:
    """Whether each split holds at least one sample; None counts as enough."""
    problems = []
    for split, count in tokens.items():
        needed = split == "train" or config.data.validation_fraction > 0
        if needed and count is not None and count <= config.training.sequence_length:
            problems.append(too_small_problem(config, split, count))
    return problems


def _count(parts: tuple[Part, ...], tokenizer: Tokenizer) -> int | None:
    """Tokens of a split, end-of-text included; None when it is too large to count them here."""
    if sum(part.end - part.start for part in parts) > _ENCODED_BYTES:
        return None
    texts = [b"".join(read_pieces(part.document, part.start, part.end)) for part in parts]
    return sum(len(ids) + 1 for ids in tokenizer.encode(texts))


def _look_at(listing: Listing) -> list[Problem]:
    """The first file that is not text, among some, by its beginning."""
    stride = -(-len(listing.documents) // _LOOKED_AT_FILES)
    for document in listing.documents[::stride]:
        try:
            with document.path.open("rb") as file:
                start = file.read(_LOOKED_AT_BYTES)
            check_text(start, document.path, complete=len(start) == document.size_bytes)
        except NotTextError as error:
            return [not_text(error)]
        except OSError as error:
            return [unreadable(document.path, error)]
    return []
