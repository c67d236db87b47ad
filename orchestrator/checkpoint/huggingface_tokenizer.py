"""The tokenizer beside exported weights: the files of the one that was trained with, or one that does what `bytes` does

Hugging Face's classes read the ids of special tokens from the model's configuration too; both are written to agree.
No torch; nothing is guessed: where there is no tokenizer, none is written and `note` says why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.folder import Location
from orchestrator.checkpoint.storage import open_folder
from orchestrator.data.tokenizers import BYTES, ByteTokenizer, open_tokenizer, tokenizer_path
from orchestrator.errors import ConfigError, Problem

NONE = "none"
"""Word for an export without a tokenizer."""

END_OF_TEXT = "<|endoftext|>"
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that belong to the `tokenizer.json` beside which they lie."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What an export writes of a tokenizer."""

    special_ids: dict[str, int | None]
    """`bos_token_id`, `eos_token_id`, `pad_token_id` of the model's configuration."""
    note: str
    """What it is, or why there is none, in one line."""
    made: dict[str, Any] = field(default_factory=dict)
    """JSON files to write, by name."""
    copied: tuple[Path, ...] = ()
    """Files to copy as they are."""

    def write(self, place: Location) -> None:
        """Put the files into a folder. Raises OSError."""
        folder = open_folder(place)
        for path in self.copied:
            folder.write_whole(path.name, path.read_bytes())
        for name, values in self.made.items():
            folder.write_whole(name, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())


def tokenizer_files(name: str, *, key: str = "--tokenizer") -> TokenizerFiles:
    """The files of a tokenizer: `bytes`, `none`, a `tokenizer.json` or the folder of one.

    Raises ConfigError, naming `key`, when there is no such file or it is no tokenizer.
    """
    if name == NONE:
        return TokenizerFiles(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")), "no tokenizer")
    if name == BYTES:
        return _byte_files()
    try:
        end_of_text = open_tokenizer(name).end_of_text
        path = tokenizer_path(name)
    except ConfigError as error:
        fix = f"Name the tokenizer that was trained with ({key} FOLDER), or export without one ({key} {NONE})."
        raise ConfigError([Problem(key, problem.message, fix) for problem in error.problems]) from None
    companions = tuple(path.parent / file for file in COMPANIONS if (path.parent / file).is_file())
    words = json.loads(path.read_text(encoding="utf-8"))
    ids = {entry["content"]: int(entry["id"]) for entry in words.get("added_tokens", ())}
    settings = _settings(path.parent)
    made = {}
    if not settings:
        end = next((word for word, token in ids.items() if token == end_of_text), None)
        made["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    special: dict[str, int | None] = {
        "bos_token_id": ids.get(_word(settings.get("bos_token"))),
        "eos_token_id": end_of_text,
        "pad_token_id": ids.get(_word(settings.get("pad_token"))),
    }
    return TokenizerFiles(special, f"tokenizer from {path}", made, (path, *companions))


def _settings(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _word(token: Any) -> str:
    """A special token of a `tokenizer_config.json`: a string, or an object that has it as `content`."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _byte_files() -> TokenizerFiles:
    """Byte-level BPE without a single merge: each byte of UTF-8 is its own id, end-of-text is 256.

    One difference from `bytes` remains: where a text itself holds the word of the end-of-text token, the library reads
    it as that token.
    """
    end = ByteTokenizer.end_of_text
    made = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": end,
                    "content": END_OF_TEXT,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {letter: byte for byte, letter in enumerate(byte_letters())},
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    }
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    return TokenizerFiles(special, "data.tokenizer=bytes as a byte-level tokenizer.json", made)


def byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers (GPT-2, Radford et al. 2019) write for each of the 256 bytes.

    Bytes that Latin-1 prints stand for themselves; the others take the letters from 256 on, in order.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]
