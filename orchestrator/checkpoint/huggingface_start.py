"""Whether a run can start from Hugging Face weights, found out before anything starts: files, model and tokenizer.

Headers are read, values only where a tied head must equal the embedding; everything is said at once. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.checkpoint.huggingface_folder import match, model_problems, open_huggingface
from orchestrator.checkpoint.storage import Folder, LocalFolder
from orchestrator.config.model_folder import FolderError, read_sizes
from orchestrator.config.schema import RunConfig
from orchestrator.data.tokenizers import BYTES, Tokenizer, open_tokenizer
from orchestrator.errors import ConfigError, Problem

KEY = "checkpoint.init_from"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 2024-05-31.\n\n\tdef f(x): return x**2  # naïve café\r\n"
    "Größe, 你好，世界! Привет мир — שלום, 😀 </a> ..."
)
"""Text whose ids differ between tokenizers that are not the same; without the words of special tokens, which a text
seldom holds and `bytes` does not know."""


def problems_of_weights(config: RunConfig, path: str) -> list[Problem]:
    """Every reason against starting `config` from the Hugging Face model at a path or URL.

    Raises StorageError when an object store does not answer.
    """
    try:
        folder = open_huggingface(path)
    except FolderError as error:
        fix = "Give a folder with config.json and model.safetensors, as `save_pretrained` writes it."
        return [Problem(KEY, f"{path}: {fault}.", fix) for fault in error.faults]
    try:
        stored = read_sizes(folder.config)
    except FolderError as error:
        fix = (
            "If the model computes the same without that key, take it out of config.json; else this model cannot be "
            "loaded."
        )
        return [Problem(KEY, f"{path}: {fault}.", fix) for fault in error.faults]
    problems = model_problems(f"{KEY}={path}", path, stored, config.model)
    try:
        match(folder, stored)
    except FolderError as error:
        fix = "The tensors must be those of the model that config.json describes: get the files again, or mend it."
        problems += [Problem(KEY, f"{path}: {fault}.", fix) for fault in error.faults]
    return [*problems, *_tokenizer_problems(config, folder.folder)]


def _tokenizer_problems(config: RunConfig, folder: Folder) -> list[Problem]:
    """Text must be cut into the ids that the weights were trained on."""
    asked = config.data.tokenizer
    there = [name for name in TOKENIZER_FILES if folder.has(name)]
    if config.data.source == "synthetic" or not there:
        return []
    try:
        ours = open_tokenizer(asked)
    except ConfigError:
        return []  # told by the check of the data
    with _on_disk(folder) as place:
        try:
            theirs = open_tokenizer(str(place))
        except ConfigError:
            differ = asked == BYTES
        else:
            differ = _ids(ours) != _ids(theirs)
    if not differ:
        return []
    if not isinstance(folder, LocalFolder):
        fix = "Copy its tokenizer.json and tokenizer_config.json into a folder and set data.tokenizer to that."
    else:
        fix = f"Set data.tokenizer={folder}" + ("." if "tokenizer.json" in there else ", once it has a tokenizer.json.")
    return [
        Problem(
            "data.tokenizer",
            f"{KEY}={folder} was trained with its own tokenizer ({there[0]}), data.tokenizer={asked} gives other ids: "
            "its embedding would mean nothing.",
            fix,
        )
    ]


@contextmanager
def _on_disk(folder: Folder) -> Iterator[Path]:
    """Where the tokenizers library finds the tokenizer of a folder, for the time of the block."""
    if isinstance(folder, LocalFolder):
        yield folder.path
        return
    with TemporaryDirectory() as place:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if folder.has(name):
                (Path(place) / name).write_bytes(folder.read(name))
        yield Path(place)


def _ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the probe; the end-of-text token is the user's choice."""
    return [int(token) for token in tokenizer.encode([_PROBE.encode()])[0]]
