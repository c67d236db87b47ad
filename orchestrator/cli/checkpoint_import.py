"""`checkpoint import`: a Hugging Face model becomes a checkpoint of this project, with the command that starts from it.

The model lies in a folder or an object store, the checkpoint goes to a folder.

Everything against it is told at once and nothing is written then. The target folder appears in one rename, complete:
`step-00000000/` and the tokenizer's files. torch is imported only for the work itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from orchestrator.cli.invocation import Invocation
from orchestrator.config.model_folder import CONFIG_NAME, FolderError, read_sizes
from orchestrator.config.schema.model import ModelConfig
from orchestrator.config.urls import is_url, url_problem
from orchestrator.errors import ConfigError, Problem, RunError

if TYPE_CHECKING:
    from orchestrator.checkpoint.huggingface_folder import HuggingFaceFolder, Source
    from orchestrator.checkpoint.storage import Folder

SUMMARY = "Hugging Face weights into a checkpoint of this project"

HELP = """\
python -m orchestrator checkpoint import HUGGING_FACE_FOLDER TARGET [model.KEY=VALUE ...]

  Writes TARGET/step-00000000 (weights alone, verifiable, for any plan) and TARGET/tokenizer from a folder with
  config.json and safetensors (one file or an index) of LLaMA, Mistral, SmolLM, Qwen2 or GPT-2, and prints the command
  that trains from it. The Hugging Face folder may be s3://BUCKET/PREFIX; TARGET may not. A run can also start from the
  folder itself:
    model=FOLDER checkpoint.init_from=FOLDER data.tokenizer=FOLDER
  model.KEY=VALUE changes what weights do not depend on (model.attention_dropout, model.max_position_embeddings).

  python -m orchestrator checkpoint import SmolLM2-135M-Instruct/ imported/smollm2
"""

FLAGS = ()

_KEY = "checkpoint import"


def run(invocation: Invocation, words: Sequence[str]) -> int:
    """Import. Raises ConfigError with everything that stands against it."""
    paths = [word for word in words if not word.startswith("model.")]
    if len(paths) != 2:
        wrong = f"It takes a Hugging Face folder and a folder to make, and {len(paths)} were given."
        raise ConfigError(Problem(_KEY, wrong, "Write `checkpoint import HUGGING_FACE_FOLDER TARGET`."))
    source = paths[0].rstrip("/") if is_url(paths[0]) else str(Path(paths[0]).expanduser())
    overrides = [word for word in words if word.startswith("model.")]
    _import(source, paths[1], overrides, invocation)
    return 0


def _import(source: str, word: str, overrides: Sequence[str], invocation: Invocation) -> None:
    from orchestrator.checkpoint.huggingface_folder import match, model_problems, open_huggingface
    from orchestrator.checkpoint.storage import StorageError

    target = Path(word).expanduser()
    problems = _refusals(word, target)
    try:
        folder = open_huggingface(source)
        stored = read_sizes(folder.config)
        model = _with(stored, folder, overrides, invocation)
        problems += model_problems(source, source, stored, model)
        sources = match(folder, stored)
    except FolderError as error:
        fix = "Give a folder as `save_pretrained` writes it, of a model that is implemented."
        raise ConfigError([*problems, *(Problem(_KEY, f"{source}: {fault}.", fix) for fault in error.faults)]) from None
    except StorageError as error:
        raise ConfigError([*problems, Problem(_KEY, f"{error.message}.", error.fix)]) from None
    if problems:
        raise ConfigError(problems)
    facts = {"imported_from": source if is_url(source) else str(Path(source).absolute())}
    print("\n".join(_write(folder.folder, target, model, sources, facts)), flush=True)


def _refusals(word: str, target: Path) -> list[Problem]:
    from orchestrator.checkpoint.huggingface_folder import refusals_of_target
    from orchestrator.checkpoint.storage import LocalFolder

    if is_url(word) or url_problem(word) is not None:
        fix = "Give a folder, and copy it there when it is complete."
        return [Problem(_KEY, f"{word} is in an object store, and an import writes to a file system.", fix)]
    return refusals_of_target(LocalFolder(target), _KEY)


def _write(
    source: Folder, target: Path, model: ModelConfig, sources: dict[str, Source], facts: dict[str, str]
) -> list[str]:
    """Make the target and say what it is."""
    from orchestrator.checkpoint.appearing import appearing, left_of
    from orchestrator.checkpoint.huggingface_import import import_weights
    from orchestrator.checkpoint.manifest import MANIFEST_NAME
    from orchestrator.checkpoint.object_storage import PATIENCE_SECONDS, hurried
    from orchestrator.checkpoint.ranks import CheckpointError
    from orchestrator.checkpoint.storage import LocalFolder

    try:
        with hurried(PATIENCE_SECONDS), appearing(target) as temporary:  # what has begun is worth waiting for
            has_tokenizer = _copy_tokenizer(source, temporary / "tokenizer")
            data = {"data": {"tokenizer": str((target / "tokenizer").absolute())}} if has_tokenizer else {}
            checkpoint = import_weights(temporary, model, sources, {**facts, **data})
    except (CheckpointError, OSError) as error:
        raise RunError(Problem(_KEY, f"{target} could not be written: {error}.", "")) from error
    except KeyboardInterrupt:
        said = left_of(LocalFolder(target), MANIFEST_NAME)
        raise KeyboardInterrupt(f"The import was stopped. {said}") from None
    return _closing(target, model, checkpoint.manifest.size_bytes, has_tokenizer)


def _with(
    stored: ModelConfig, folder: HuggingFaceFolder, overrides: Sequence[str], invocation: Invocation
) -> ModelConfig:
    """The stored model with what was typed; `load` judges words and values."""
    if not overrides:
        return stored
    with TemporaryDirectory() as place:
        (Path(place) / CONFIG_NAME).write_text(json.dumps(folder.config), encoding="utf-8")
        return invocation.load([f"model='{place}'", *overrides]).model


def _copy_tokenizer(source: Folder, target: Path) -> bool:
    """Copy the files of a tokenizer; False: none lies there that could be used."""
    from orchestrator.checkpoint.huggingface_tokenizer import COMPANIONS

    if not source.has("tokenizer.json"):
        return False
    target.mkdir()
    for name in ("tokenizer.json", *COMPANIONS):
        if source.has(name):
            (target / name).write_bytes(source.read(name))
    return True


def _closing(target: Path, model: ModelConfig, size_bytes: int, has_tokenizer: bool) -> list[str]:
    from models.spec import parameter_count
    from orchestrator.checkpoint.manifest import step_name

    checkpoint = target / step_name(0)
    tokenizer = target / "tokenizer" if has_tokenizer else "ITS_TOKENIZER"
    command = [
        *("python", "-m", "orchestrator", f"model={checkpoint}", f"checkpoint.init_from={checkpoint}"),
        *("data=text", "data.path=YOUR_TEXTS", f"data.tokenizer={tokenizer}"),
    ]
    note = [] if has_tokenizer else [
        "no tokenizer.json lies beside the weights: ITS_TOKENIZER stands for the one that they were trained with, the "
        "folder of a tokenizer.json or `bytes`"
    ]  # fmt: skip
    return [
        f"{parameter_count(model):,} parameters, {size_bytes / 1e6:,.0f} MB, in {checkpoint}",
        f"train from it:  {shlex.join(command)}",
        *note,
        str(checkpoint),
    ]
