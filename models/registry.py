"""The list of model families: one line each.

Owns the way from a family's name to its pure half (imported) and its torch half (a dotted string, so that nothing pure
ever imports torch; the engine resolves it). Refuses nothing: an unknown name is a KeyError naming the known ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from models.gpt import huggingface as gpt_huggingface
from models.gpt import parameters as gpt_parameters
from models.gpt import sharding as gpt_sharding
from models.huggingface import ForeignWeight, ImportedSizes, Refusal
from models.llama import huggingface as llama_huggingface
from models.llama import parameters as llama_parameters
from models.llama import sharding as llama_sharding
from models.parameters import ModelSizes, ParameterSpec, ShardingTable, SizeProblem


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model."""

    name: str
    parameter_specs: Callable[[ModelSizes], tuple[ParameterSpec, ...]]
    """Every parameter in forward order."""
    sharding_table: Callable[[ModelSizes], ShardingTable]
    """How it may be cut."""
    size_problems: Callable[[ModelSizes], tuple[SizeProblem, ...]]
    """Sizes that it cannot build."""
    foreign_weights: Callable[[ModelSizes], tuple[ForeignWeight, ...]]
    """Where Hugging Face keeps every parameter."""
    foreign_prefix: str
    """Beginning of all those names but the head's, absent in files written by the bare model."""
    ignored_weights: tuple[str, ...]
    """Patterns (`fnmatch`) of tensors in Hugging Face files that are no parameters."""
    sizes_from_config: Callable[[Mapping[str, Any]], ImportedSizes]
    """Reads a Hugging Face `config.json`."""
    config_from_sizes: Callable[[ModelSizes], tuple[dict[str, Any], tuple[Refusal, ...]]]
    """Writes one."""
    model_types: tuple[str, ...]
    """Values of `model_type` in a `config.json` that belong to the family."""
    module: str
    """`package.module:Class` of the torch module; called as Class(sizes, layers=…, embedding=…, head=…,
    sequence_length=…)."""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        name="llama",
        parameter_specs=llama_parameters.parameter_specs,
        sharding_table=llama_sharding.sharding_table,
        size_problems=llama_parameters.size_problems,
        foreign_weights=llama_huggingface.foreign_weights,
        foreign_prefix=llama_huggingface.PREFIX,
        ignored_weights=llama_huggingface.IGNORED_WEIGHTS,
        sizes_from_config=llama_huggingface.sizes_from_config,
        config_from_sizes=llama_huggingface.config_from_sizes,
        model_types=tuple(llama_huggingface.CONTEXT_DEFAULTS),
        module="models.llama.module:LlamaModel",
    ),
    "gpt": Family(
        name="gpt",
        parameter_specs=gpt_parameters.parameter_specs,
        sharding_table=gpt_sharding.sharding_table,
        size_problems=gpt_parameters.size_problems,
        foreign_weights=gpt_huggingface.foreign_weights,
        foreign_prefix=gpt_huggingface.PREFIX,
        ignored_weights=gpt_huggingface.IGNORED_WEIGHTS,
        sizes_from_config=gpt_huggingface.sizes_from_config,
        config_from_sizes=gpt_huggingface.config_from_sizes,
        model_types=("gpt2",),
        module="models.gpt.module:GptModel",
    ),
}


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        KeyError: no such family; the message lists those that exist.
    """
    try:
        return FAMILIES[name]
    except KeyError:
        raise KeyError(f"model family {name!r} does not exist; there are {', '.join(sorted(FAMILIES))}") from None


def family_of_model_type(model_type: object) -> Family | None:
    """The family that reads a Hugging Face `config.json` of that `model_type`; None: no family does."""
    return next((one for one in FAMILIES.values() if model_type in one.model_types), None)
