"""A Hugging Face model as one of our checkpoints: weights only, at step 0, verifiable and loadable under any plan.

Tensors are read one by one while they are written, so that no more than one is held. What the folder holds and whether
it fits is judged in `huggingface_folder.py` before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from models.spec import parameter_specs
from orchestrator.checkpoint.folder import Checkpoint, Location
from orchestrator.checkpoint.huggingface_folder import Source
from orchestrator.checkpoint.huggingface_read import DTYPES, Part, fill
from orchestrator.checkpoint.manifest import Manifest, package_versions
from orchestrator.checkpoint.write import save
from orchestrator.config.schema.model import ModelConfig

_PREFIX = "model."


def import_weights(
    directory: Location, model: ModelConfig, sources: Mapping[str, Source], config: Mapping[str, Any]
) -> Checkpoint:
    """Write `directory/step-00000000` from the sources of every parameter (`huggingface_folder.match`).

    Args:
        directory: path or URL; made if missing.
        model: the model that the weights are of.
        sources: where each parameter lies.
        config: what else the manifest says (`data.tokenizer`, where the weights come from).

    Raises CheckpointError when it cannot be written or read; nothing is left of it.
    """
    shapes = {spec.name: spec.shape for spec in parameter_specs(model)}
    state = {
        name: torch.empty(shapes[name], dtype=DTYPES[source.tensor.dtype], device="meta")
        for name, source in sources.items()
    }
    manifest = Manifest(
        step=0,
        tokens=0,
        seed=0,
        data_fingerprint="",
        data_position={},
        parallel={},
        mesh=(),
        config={"model": model.model_dump(), **config},
        versions=dict(package_versions()),
    )
    return save(directory, 0, {"model": state}, manifest, planner=_Reading(sources, shapes))


class _Reading(DefaultSavePlanner):
    """Gives a tensor's values when they are asked for; until then it is a shape and a type."""

    def __init__(self, sources: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._sources = sources
        self._shapes = shapes

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The whole parameter in its stored type."""
        name = write_item.index.fqn.removeprefix(_PREFIX)
        source, shape = self._sources[name], self._shapes[name]
        values = torch.empty(shape, dtype=DTYPES[source.tensor.dtype])
        fill({name: Part(values, (0,) * len(shape), shape)}, {name: source})
        return values
