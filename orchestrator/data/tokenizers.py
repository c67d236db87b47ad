"""Text to token ids: plain bytes, or a `tokenizer.json` of the tokenizers library.

Owns the vocabulary size, the end-of-text token that closes each document, and an identity that depends on the
tokenizer's content and not on its path. Refuses a file that is no `tokenizer.json`, and one without end-of-text token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.errors import ConfigError, Problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Library

Tokens = npt.NDArray[Any]
"""Token ids in the type of `token_type`."""

BYTES = "bytes"
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<end_of_text>")
"""End-of-text tokens of the common families, used when no `tokenizer_config.json` beside the file names one."""


class Tokenizer(Protocol):
    """What the cache, the baseline and generation need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""

    @property
    def end_of_text(self) -> int:
        """Id of the token that follows each document."""

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Ids of each piece of UTF-8 text, without end-of-text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; end-of-text is left out and broken characters are replaced."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and end-of-text as 256."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Ids of each piece: its bytes."""
        return [np.frombuffer(piece, dtype=np.uint8).astype(np.uint16) for piece in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; end-of-text is left out and broken characters are replaced."""
        return bytes(token for token in ids if token < self.end_of_text).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A `tokenizer.json`, as Hugging Face models ship it."""

    def __init__(self, library: _Library, end_of_text: int) -> None:
        # Both may be set in the file, and both would silently change the training text.
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.end_of_text = end_of_text
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Ids of each piece of UTF-8 text; no special tokens are added."""
        texts = [piece.decode("utf-8") for piece in pieces]
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=token_type(self.vocab_size)) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return str(self._library.decode(list(ids), skip_special_tokens=True))


def token_type(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type that holds every id of the vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`: `bytes`, a `tokenizer.json`, or a folder that holds one.

    Raises ConfigError when there is no such file, it is not a `tokenizer.json`, or it has no end-of-text token.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = tokenizer_path(name)
    _read(path)
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for everything
        raise ConfigError(
            Problem(
                "data.tokenizer",
                f"{path} is not a tokenizer.json of the tokenizers library: {error}.",
                "Use the tokenizer.json that ships with a Hugging Face model (not tokenizer_config.json, vocab.json or "
                "tokenizer.model), or data.tokenizer=bytes.",
            )
        ) from None
    return JsonTokenizer(library, _find_end_of_text(library, path))


def tokenizer_identity(name: str) -> str:
    """What the tokenizer is, independent of its path: `bytes`, or a digest of everything that decides its ids."""
    if name == BYTES:
        return BYTES
    path = tokenizer_path(name)
    named = _named_end_of_text(path)
    return hashlib.blake2b(_read(path) + (named or "").encode(), digest_size=16).hexdigest()


def tokenizer_path(name: str) -> Path:
    """Absolute path of the `tokenizer.json` that `name` means; raises ConfigError when there is none."""
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            Problem(
                "data.tokenizer",
                f"{path} does not exist." if not path.exists() else f"{path} is not a file.",
                "Set data.tokenizer to `bytes`, to a tokenizer.json on disk, or to the folder that holds one.",
            )
        )
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            Problem(
                "data.tokenizer", f"{path} cannot be read: {error.strerror}.", "Change its permissions or the path."
            )
        ) from None


def _named_end_of_text(path: Path) -> str | None:
    """The `eos_token` of the `tokenizer_config.json` beside the file; None when there is none."""
    try:
        value = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _find_end_of_text(library: _Library, path: Path) -> int:
    named = _named_end_of_text(path)
    candidates = (named,) if named else _END_OF_TEXT
    for candidate in candidates:
        token = library.token_to_id(candidate)
        if token is not None:
            return int(token)
    raise ConfigError(
        Problem(
            "data.tokenizer",
            f"{path} has no end-of-text token: looked for {', '.join(candidates)}"
            + (" (eos_token of tokenizer_config.json)." if named else "."),
            "Add one to the file's added_tokens, or name it as eos_token in a tokenizer_config.json beside it.",
        )
    )
