"""`checkpoint import`: a Hugging Face model becomes a checkpoint of this project, with the command that starts from it.

Everything against it is told at once and nothing is written then. The target folder appears in one rename, complete:
`step-00000000/` and the tokenizer's files. torch is imported only for the work itself.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from orchestrator.cli.invocation import Invocation
from orchestrator.config.model_folder import FolderError, read_sizes
from orchestrator.config.schema.model import ModelConfig
from orchestrator.errors import ConfigError, Problem, RunError

SUMMARY = "Hugging Face weights into a checkpoint of this project"

HELP = """\
python -m orchestrator checkpoint import HUGGING_FACE_FOLDER TARGET [model.KEY=VALUE ...]

  Writes TARGET/step-00000000 (weights alone, verifiable, for any plan) and TARGET/tokenizer from a folder with
  config.json and safetensors (one file or an index) of LLaMA, Mistral, SmolLM, Qwen2 or GPT-2, and prints the command
  that trains from it. A run can also start from the folder itself:
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
    source, target = (Path(path).expanduser() for path in paths)
    overrides = [word for word in words if word.startswith("model.")]
    _import(source, target, overrides, invocation)
    return 0


def _import(source: Path, target: Path, overrides: Sequence[str], invocation: Invocation) -> None:
    from orchestrator.checkpoint.huggingface_folder import match, model_problems, open_huggingface, refusals_of_target

    problems = refusals_of_target(target, _KEY)
    try:
        folder = open_huggingface(source)
        stored = read_sizes(folder.config)
        model = _with(stored, folder.path, overrides, invocation)
        problems += model_problems(str(source), str(source), stored, model)
        sources = match(folder, stored)
    except FolderError as error:
        fix = "Give a folder as `save_pretrained` writes it, of a model that is implemented."
        raise ConfigError([*problems, *(Problem(_KEY, f"{source}: {fault}.", fix) for fault in error.faults)]) from None
    if problems:
        raise ConfigError(problems)

    from orchestrator.checkpoint.appearing import appearing
    from orchestrator.checkpoint.huggingface_import import import_weights
    from orchestrator.checkpoint.ranks import CheckpointError

    try:
        with appearing(target) as temporary:
            tokenizer = _copy_tokenizer(folder.path, temporary / "tokenizer")
            facts = {"imported_from": str(source.absolute())}
            data = {} if tokenizer is None else {"data": {"tokenizer": str((target / "tokenizer").absolute())}}
            checkpoint = import_weights(temporary, model, sources, {**facts, **data})
    except (CheckpointError, OSError) as error:
        raise RunError(Problem(_KEY, f"{target} could not be written: {error}.", "")) from error
    size = checkpoint.manifest.size_bytes
    print("\n".join(_closing(target, model, size, tokenizer)), flush=True)


def _with(stored: ModelConfig, folder: Path, overrides: Sequence[str], invocation: Invocation) -> ModelConfig:
    """The stored model with what was typed; `load` judges words and values."""
    if not overrides:
        return stored
    return invocation.load([f"model='{folder.absolute()}'", *overrides]).model


def _copy_tokenizer(source: Path, target: Path) -> Path | None:
    from orchestrator.checkpoint.huggingface_tokenizer import COMPANIONS

    files = [source / name for name in ("tokenizer.json", *COMPANIONS) if (source / name).is_file()]
    if not files:
        return None
    target.mkdir()
    for file in files:
        shutil.copyfile(file, target / file.name)
    return target


def _closing(target: Path, model: ModelConfig, size_bytes: int, tokenizer: Path | None) -> list[str]:
    from models.spec import parameter_count
    from orchestrator.checkpoint.manifest import step_name

    checkpoint = target / step_name(0)
    words = [f"model={checkpoint}", f"checkpoint.init_from={checkpoint}", "data=text", "data.path=YOUR_TEXTS"]
    if tokenizer is not None:
        words.append(f"data.tokenizer={target / 'tokenizer'}")
    return [
        f"{parameter_count(model):,} parameters, {size_bytes / 1e6:,.0f} MB, in {checkpoint}",
        "train from it:  python -m orchestrator " + shlex.join(words),
        str(checkpoint),
    ]
