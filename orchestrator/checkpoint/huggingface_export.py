"""A checkpoint of any plan as a Hugging Face folder: safetensors, `config.json`, `generation_config.json`, tokenizer.

Streams tensor by tensor: no more than one tensor and a block are held. The folder appears whole (`appearing.py`); in an
object store `config.json`, without which it is no model, is written last. Refuses an existing target, a model that no
Hugging Face class computes, and values beyond the type asked for. Reading such folders: `huggingface_folder.py`; the
tokenizer: `huggingface_tokenizer.py`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.huggingface import ForeignWeight
from models.registry import family
from orchestrator.checkpoint.appearing import appearing_at
from orchestrator.checkpoint.folder import Checkpoint, Location
from orchestrator.checkpoint.huggingface_folder import INDEX_NAME, WEIGHTS_NAME, refusals_of_target
from orchestrator.checkpoint.huggingface_tokenizer import TokenizerFiles
from orchestrator.checkpoint.safetensors_file import BLOCK_BYTES, ITEM_BYTES, header_bytes
from orchestrator.checkpoint.storage import Folder, LocalFolder, Sink, open_folder
from orchestrator.checkpoint.tensors import CheckpointTensors
from orchestrator.config.model_folder import CONFIG_NAME
from orchestrator.config.schema.model import ModelConfig
from orchestrator.errors import ConfigError, Problem, RunError

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest file of an export, as Hugging Face cuts them."""

_WORDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_CONFIG_WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    path: str
    """Path or URL."""
    files: tuple[str, ...]
    size_bytes: int
    """Of the weights."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the export."""

    name: str
    """In Hugging Face's words."""
    weights: tuple[ForeignWeight, ...]
    """Our parameters that it holds, in order."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def export(
    checkpoint: Checkpoint,
    target: Location,
    *,
    tokenizer: TokenizerFiles,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        checkpoint: complete and verified.
        target: a folder that does not exist yet, path or URL.
        tokenizer: what goes beside the weights.
        dtype: type of every tensor; None: as saved.
        max_shard_bytes: most bytes of one safetensors file; a larger tensor has a file of its own.
        told: called with (bytes written, bytes in all) after each tensor.

    Raises:
        ConfigError: refused before anything was written.
        RunError: it failed on the way; nothing is left of it.
    """
    model = _model_of(checkpoint)
    tensors = CheckpointTensors(checkpoint)
    entries = _entries(model, tensors, dtype, checkpoint.path)
    config, generation = _configs(model, entries, tokenizer)
    total = sum(entry.size_bytes for entry in entries)
    place = open_folder(target)
    _check_room(place, total)
    try:
        with appearing_at(place) as folder:
            files = _write_weights(folder, entries, tensors, max_shard_bytes, lambda done: told(done, total))
            tokenizer.write(folder)
            _write_json(folder, "generation_config.json", generation)
            _write_json(folder, CONFIG_NAME, config)
    except (OSError, ValueError) as error:
        fix = getattr(error, "fix", "")
        raise RunError(Problem("", f"The export to {place} failed: {error}.", fix)) from error
    return Exported(str(place), files, total)


def _model_of(checkpoint: Checkpoint) -> ModelConfig:
    try:
        return ModelConfig.model_validate(checkpoint.manifest.config["model"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            Problem("", f"The manifest of {checkpoint.path} does not say which model it is of ({error}).", "")
        ) from None


def _entries(
    model: ModelConfig, tensors: CheckpointTensors, dtype: torch.dtype | None, place: str
) -> tuple[Entry, ...]:
    """Every tensor to write, in the order of the model; all that is missing in the checkpoint is named."""
    weights = family(model.family).foreign_weights(model)
    missing = [weight.name for weight in weights if f"model.{weight.name}" not in tensors.names()]
    if missing:
        shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        raise ConfigError(Problem("", f"{place} lacks {len(missing)} parameters of its model: {shown}.", ""))
    groups: dict[str, list[ForeignWeight]] = {}
    for weight in weights:
        groups.setdefault(weight.foreign, []).append(weight)
    entries = []
    for name, group in groups.items():
        parts = tuple(sorted(group, key=lambda weight: weight.part))
        stored = f"model.{parts[0].name}"
        shape = parts[0].foreign_shape(tensors.shape(stored))
        entries.append(Entry(name, parts, dtype or tensors.dtype(stored), shape))
    return tuple(entries)


def _configs(
    model: ModelConfig, entries: tuple[Entry, ...], tokenizer: TokenizerFiles
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(`config.json`, `generation_config.json`). Raises ConfigError for what no Hugging Face class computes."""
    config, refused = family(model.family).config_from_sizes(model)
    if refused:
        fix = "Keep the checkpoint: it loads here under any plan."
        raise ConfigError(
            [Problem(f"model.{key}", f"cannot be exported: it {reason}.", fix) for key, reason in refused]
        )
    word = _CONFIG_WORDS[_WORDS[entries[0].dtype]]
    # Both spellings of the type: transformers 5 reads `dtype`, older releases `torch_dtype`. Ids are written out even
    # where there are none: the classes' own defaults are those of other vocabularies.
    config |= {"dtype": word, "torch_dtype": word, **tokenizer.special_ids, "use_cache": True}
    generation = {key: value for key, value in tokenizer.special_ids.items() if value is not None}
    return config, {"_from_model_config": True, **generation}


def _check_room(target: Folder, total: int) -> None:
    if refusals := refusals_of_target(target, ""):
        raise ConfigError(refusals)
    if not isinstance(target, LocalFolder):
        return
    parent = next(folder for folder in target.path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(Problem("", f"{target} cannot be made in {parent}.", "Give a folder that can be written to."))
    free = shutil.disk_usage(parent).free
    if free < total:
        needed = f"The export takes {total / 1e9:.3g} GB, {parent} has {free / 1e9:.3g} GB left."
        raise ConfigError(Problem("", needed, "Make room, choose another target, or export with --dtype bf16."))


def _write_weights(
    folder: Folder,
    entries: tuple[Entry, ...],
    tensors: CheckpointTensors,
    max_shard_bytes: int,
    told: Callable[[int], None],
) -> tuple[str, ...]:
    shards = _shards(entries, max_shard_bytes)
    places: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = header_bytes({entry.name: (_WORDS[entry.dtype], entry.shape) for entry in shard})
        with _new_file(folder, name, len(header) + sum(entry.size_bytes for entry in shard)) as sink:
            sink.write([memoryview(header)])
            for entry in shard:
                _write_tensor(sink, entry, tensors)
                places[entry.name] = name
                done += entry.size_bytes
                told(done)
    if len(shards) > 1:
        _write_json(folder, INDEX_NAME, {"metadata": {"total_size": done}, "weight_map": places})
    return tuple(dict.fromkeys(places.values()))


@contextmanager
def _new_file(folder: Folder, name: str, size_bytes: int) -> Iterator[Sink]:
    """A file that is there for good when the block ends, and not at all if it raises."""
    sink = folder.create(name, size_bytes)
    try:
        yield sink
        sink.close()
    except BaseException:
        sink.discard()
        raise


def _shards(entries: tuple[Entry, ...], max_shard_bytes: int) -> list[list[Entry]]:
    """Consecutive tensors, in as many files as needed for none to be larger than asked, headers apart."""
    shards: list[list[Entry]] = []
    filled = 0
    for entry in entries:
        if not shards or filled + entry.size_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size_bytes
    return shards


def _write_tensor(sink: Sink, entry: Entry, tensors: CheckpointTensors) -> None:
    if not entry.weights[0].transposed:
        for weight in entry.weights:
            _write_rows(sink, entry, tensors.read(f"model.{weight.name}"))
        return
    # Each row of the foreign tensor has a piece of every part.
    parts = [tensors.read(f"model.{weight.name}").t() for weight in entry.weights]
    for rows in _row_blocks(entry.shape, entry.dtype):
        _write_rows(sink, entry, torch.cat([part[rows] for part in parts], dim=1))


def _write_rows(sink: Sink, entry: Entry, values: Tensor) -> None:
    for rows in _row_blocks(tuple(values.shape), values.dtype):
        block = values[rows]
        cast = block.to(entry.dtype).contiguous()
        if entry.dtype == torch.float16 and not bool((cast.isfinite() | ~block.isfinite()).all()):
            raise ValueError(f"{entry.name} has values beyond 65504, the largest of FP16 (export with --dtype bf16)")
        sink.write([cast.view(-1).view(torch.uint8).numpy().data])


def _row_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))


def _write_json(folder: Folder, name: str, values: Mapping[str, Any]) -> None:
    folder.write_whole(name, (json.dumps(values, indent=2, sort_keys=True) + "\n").encode())


assert set(_WORDS.values()) == set(ITEM_BYTES)
