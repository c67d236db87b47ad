"""Whether the checkpoint that a configuration starts from can be used, found out before anything starts. No torch.

Names and sizes of its files and its model are compared; every byte is verified by the ranks when they load it.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.checkpoint.folder import open_checkpoint
from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem


def check_start(config: RunConfig) -> tuple[Problem, ...]:
    """Every reason against `checkpoint.resume=PATH` and `checkpoint.init_from`."""
    problems: list[Problem] = []
    if config.checkpoint.resume not in ("auto", "never"):
        problems += _problems_of(config, "checkpoint.resume", config.checkpoint.resume)
    if config.checkpoint.init_from is not None:
        problems += _problems_of(config, "checkpoint.init_from", config.checkpoint.init_from)
    return tuple(problems)


def _problems_of(config: RunConfig, key: str, asked: str) -> list[Problem]:
    folder = Path(asked).expanduser()
    words = "`auto`, `never` or " if key == "checkpoint.resume" else ""
    fix = f"Give {words}the folder of a checkpoint, for example RUN/checkpoints/step-00000200."
    if (folder / "config.json").is_file() and not (folder / "manifest.json").exists():
        return [Problem(key, f"{asked} is a Hugging Face folder; this version does not read those yet.", fix)]
    try:
        checkpoint = open_checkpoint(folder)
    except ValueError as error:
        return [Problem(key, f"{error}.", fix)]
    saved = checkpoint.manifest.config.get("model", {})
    asked_model = config.to_dict()["model"]
    # Learned positions are weights, rotary ones are not.
    free = _NOT_WEIGHTS if config.model.family == "gpt" else (*_NOT_WEIGHTS, "max_position_embeddings")
    return [
        Problem(
            f"model.{name}",
            f"{key}={asked} was saved with {name}={saved[name]}, model.{name}={value} is asked for: its weights do "
            "not fit.",
            f"Set model.{name}={saved[name]}, or start from another checkpoint.",
        )
        for name, value in asked_model.items()
        if name in saved and saved[name] != value and name not in free
    ]


_NOT_WEIGHTS = ("attention_dropout", "resid_pdrop", "initializer_range")
"""Keys of a model that its saved weights do not depend on."""
