"""`checkpoint export`: a checkpoint of any plan becomes a Hugging Face folder that transformers loads.

One process reads it, whatever number of ranks wrote it. Everything against it is told at once and nothing is written
then; the target appears complete or not at all. torch is imported only for the work itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.invocation import Invocation
from orchestrator.config.urls import is_url, url_problem
from orchestrator.errors import ConfigError, OrchestratorError, Problem

if TYPE_CHECKING:
    from orchestrator.checkpoint.folder import Checkpoint
    from orchestrator.checkpoint.huggingface_tokenizer import TokenizerFiles
    from orchestrator.checkpoint.storage import Folder

SUMMARY = "a checkpoint of any plan as a Hugging Face folder"

HELP = """\
python -m orchestrator checkpoint export CHECKPOINT TARGET
    [--dtype TYPE] [--max-shard-size SIZE] [--tokenizer FOLDER] [run.directory=FOLDER]

  Writes TARGET with safetensors, config.json, generation_config.json and the run's tokenizer, for
  transformers.AutoModelForCausalLM.from_pretrained(TARGET). CHECKPOINT is a checkpoint, or a run or a folder of
  checkpoints, of which the newest complete one is taken, or an s3:// URL of these. TARGET is a folder that does
  not exist yet, or s3://BUCKET/PREFIX with nothing in it; there config.json is written last.
  Every byte is verified first; no more than one tensor is held.
  --dtype           fp32, bf16 or fp16; as saved when left out (FP32 for all precisions but bf16_pure)
  --max-shard-size  largest file, for example 500MB; 5GB when left out
  --tokenizer       another tokenizer than the run's: a folder, `bytes` or `none`

  python -m orchestrator checkpoint export quickstart-1a2b3c4d exported/
"""

FLAGS = ("--dtype", "--max-shard-size", "--tokenizer")

_KEY = "checkpoint export"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run(invocation: Invocation, words: Sequence[str]) -> int:
    """Export. Raises ConfigError with everything that stands against it, RunError when it fails on the way."""
    problems: list[Problem] = []
    settings = [word for word in words if word.startswith("run.directory=")]
    names = [word for word in words if word not in settings]
    if len(names) != 2:
        wrong = f"It takes a checkpoint and a folder to make, and {len(names)} words were given."
        raise ConfigError(Problem(_KEY, wrong, "Write `checkpoint export CHECKPOINT TARGET`."))
    dtype = _dtype(invocation.options.get("--dtype"), problems)
    shard_bytes = _size(invocation.options.get("--max-shard-size", "5GB"), problems)
    checkpoint = tokenizer = None
    try:
        checkpoint = _checkpoint([names[0], *settings])
        tokenizer = _tokenizer(checkpoint, invocation.options.get("--tokenizer"))
    except OrchestratorError as error:
        problems += error.problems
    target = _target(names[1], problems)
    if problems or checkpoint is None or tokenizer is None or target is None:
        raise ConfigError(problems)
    _export(checkpoint, target, tokenizer, dtype, shard_bytes)
    return 0


def _target(word: str, problems: list[Problem]) -> Folder | None:
    """Where to write; what stands against it is added to `problems`."""
    from orchestrator.checkpoint.huggingface_folder import refusals_of_target
    from orchestrator.checkpoint.storage import StorageError, open_folder

    if (wrong := url_problem(word)) is not None:
        problems.append(Problem(_KEY, f"{word} cannot be used: {wrong[0]}.", wrong[1]))
        return None
    try:
        target = open_folder(word.rstrip("/") if is_url(word) else Path(word).expanduser())
    except StorageError as error:
        problems.append(Problem(_KEY, f"{error.message}.", error.fix))
        return None
    problems += refusals_of_target(target, _KEY)
    return target


def _export(checkpoint: Checkpoint, target: Folder, tokenizer: TokenizerFiles, dtype: str | None, size: int) -> None:
    import torch

    from orchestrator.checkpoint.appearing import left_of
    from orchestrator.checkpoint.huggingface_export import export
    from orchestrator.checkpoint.object_storage import PATIENCE_SECONDS, hurried
    from orchestrator.config.model_folder import CONFIG_NAME

    chosen: Any = None if dtype is None else getattr(torch, dtype)
    try:
        with hurried(PATIENCE_SECONDS):  # what has begun is worth waiting for
            done = export(checkpoint, target, tokenizer=tokenizer, dtype=chosen, max_shard_bytes=size)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"The export was stopped. {left_of(target, CONFIG_NAME)}") from None
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} safetensors files and an index"
    print(f"step {checkpoint.step} of {checkpoint.path}: {done.size_bytes / 1e6:,.0f} MB in {files}; {tokenizer.note}")
    print(target, flush=True)


def _dtype(asked: str | None, problems: list[Problem]) -> str | None:
    if asked is not None and asked not in _DTYPES:
        problems.append(
            Problem("--dtype", f"`{asked}` is no type of an export.", f"Choose one of {', '.join(_DTYPES)}.")
        )
    return _DTYPES.get(asked or "")


def _size(text: str, problems: list[Problem]) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)?", text.strip().upper())
    size = int(float(found.group(1)) * _UNITS[found.group(2) or "B"]) if found else 0
    if size < 1:
        problems.append(Problem("--max-shard-size", f"`{text}` is no size.", "Write for example 500MB or 5GB."))
    return size


def _checkpoint(words: Sequence[str]) -> Checkpoint:
    """The checkpoint that was named, every byte compared with its manifest. Raises ConfigError."""
    from orchestrator.checkpoint.folder import newest_complete, open_checkpoint
    from orchestrator.checkpoint.storage import StorageError
    from orchestrator.cli.checkpoint_words import places

    ((word, place),) = places(words, "export")
    try:
        if place.is_checkpoint:
            return open_checkpoint(place.folder, read_bytes=True)
        found = newest_complete(place.folder, read_bytes=True)
    except StorageError as error:
        raise ConfigError(Problem(_KEY, f"{error.message}.", error.fix)) from None
    except ValueError as error:
        fix = "Export another one; `checkpoint ls` lists them."
        raise ConfigError(Problem(_KEY, f"{error}.", fix)) from None
    if found is None:
        fix = "`checkpoint ls` says what is there."
        raise ConfigError(Problem(_KEY, f"There is no complete checkpoint in {word} ({place.folder}).", fix))
    return found


def _tokenizer(checkpoint: Checkpoint, asked: str | None) -> TokenizerFiles:
    from orchestrator.checkpoint.huggingface_tokenizer import NONE, tokenizer_files

    if asked is not None:
        return tokenizer_files(asked)
    data = checkpoint.manifest.config.get("data", {})
    name = NONE if data.get("source") == "synthetic" else data.get("tokenizer") or NONE
    return tokenizer_files(name)
