"""The weights that a run starts from when they are a Hugging Face model: which part of each this rank holds.

Every rank reads its own rows and columns under any plan; a failure of one is known to all. What the files hold and
whether they fit is judged in `checkpoint/huggingface_folder.py`, once more here: they may have changed since the
command looked.
"""

from __future__ import annotations

from models.spec import parameter_specs
from orchestrator.checkpoint.folder import Location
from orchestrator.checkpoint.huggingface_folder import match, open_huggingface
from orchestrator.checkpoint.huggingface_read import Part, fill
from orchestrator.checkpoint.ranks import CheckpointError, Ranks
from orchestrator.config.schema import ModelConfig
from orchestrator.engine.gradients import local
from orchestrator.engine.initialise import offsets
from orchestrator.engine.state import saved_parameters
from orchestrator.engine.step import Parts
from orchestrator.errors import Problem, RunError


def load_huggingface(path: Location, parts: Parts, model: ModelConfig) -> None:
    """Fill this rank's parameters from a Hugging Face folder or file, a path or URL (collective).

    Raises RunError on every rank if the weights do not fit or cannot be read on any.
    """

    def read() -> None:
        fill(held_parts(parts, model), match(open_huggingface(path), model))

    try:
        Ranks.of().together(f"read the weights in {path}", read)
    except CheckpointError as error:
        raise RunError(
            Problem("checkpoint.init_from", str(error), "Give a place that every node sees, whole and unchanged.")
        ) from error


def held_parts(parts: Parts, model: ModelConfig) -> dict[str, Part]:
    """This rank's part of every parameter that has values of its own."""
    shapes = {spec.name: spec.shape for spec in parameter_specs(model)}
    held = {name: parts.padding.logical(name, parameter) for name, parameter in saved_parameters(parts).items()}
    return {name: Part(local(parameter).detach(), offsets(parameter), shapes[name]) for name, parameter in held.items()}
