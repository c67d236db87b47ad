"""What to change when a plan does not fit: only changes that were tried and found to fit, with what they need.

Owns the list of changes, in the order in which a person would try them. Whether a change fits is the caller's
arithmetic (`peak_of`), so that the answer is the planner's own. Never suggests what changes learning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.plan.batch import divisors
from orchestrator.plan.search_space import RECOMPUTE
from orchestrator.plan.validate.wording import gib

PeakOf = Callable[[RunConfig], int | None]
"""Bytes that the fullest rank needs, when the configuration is legal and fits; None otherwise."""

_MOST_SHOWN = 4
_TIMES_NODES = (2, 4, 8, 16, 32)

Change = dict[str, Any]
"""Dotted keys and their new values."""


def changed(config: RunConfig, change: Change) -> RunConfig:
    """The configuration with those keys changed."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    updated = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=updated)


def _families(config: RunConfig) -> Iterator[list[Change]]:
    """Changes of one kind, gentlest first; of each kind the first that fits is suggested."""
    parallel, training = config.parallel, config.training
    yield [{"parallel.zero_stage": stage} for stage in range(parallel.zero_stage + 1, 4)]
    if parallel.zero_stage > 0 and parallel.zero_group != "auto":
        yield [{"parallel.zero_group": "auto"}]
    level = RECOMPUTE.index(training.activation_checkpointing)
    yield [{"training.activation_checkpointing": recompute} for recompute in RECOMPUTE[level + 1 :]]
    sizes = [size for size in divisors(training.micro_batch_size) if size < training.micro_batch_size]
    yield [{"training.micro_batch_size": size} for size in reversed(sizes)]
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield [{"parallel.sequence_parallel": True}]
    yield [dict(_regrouped(config, "tensor", degree)) for degree in (2, 4, 8) if degree > parallel.tensor]
    yield [dict(_regrouped(config, "pipeline", degree)) for degree in (2, 4, 8, 16) if degree > parallel.pipeline]
    yield _more_nodes(config)


def _more_nodes(config: RunConfig) -> list[Change]:
    """Twice, four times ... the nodes, for the data degree to grow into."""
    nodes = config.cluster.nodes
    if config.cluster.node_groups or config.parallel.data != "auto" or nodes == "auto":
        return []
    return [{"cluster.nodes": nodes * times} for times in _TIMES_NODES]


def _regrouped(config: RunConfig, axis: str, degree: int) -> Iterator[tuple[str, Any]]:
    """A larger model split on the same GPUs: the data degree shrinks, `stage_layers` is balanced anew."""
    yield f"parallel.{axis}", degree
    if config.parallel.data != "auto":
        yield "parallel.data", max(1, config.parallel.data * getattr(config.parallel, axis) // degree)
    if axis == "pipeline" and config.parallel.stage_layers != "auto":
        yield "parallel.stage_layers", "auto"


def _together(config: RunConfig) -> list[Change]:
    """Everything that saves memory at once, then with a larger split."""
    most: Change = {"parallel.zero_stage": 3, "training.activation_checkpointing": "full"}
    if config.training.micro_batch_size > 1:
        most["training.micro_batch_size"] = 1
    sharded = {key: value for key, value in most.items() if key != "training.micro_batch_size"}
    wider = [{**most, **dict(_regrouped(config, "tensor", degree))} for degree in (2, 4, 8)]
    wider = [change for change in wider if change["parallel.tensor"] > config.parallel.tensor]
    return [sharded, most, *wider, *({**most, **more} for more in _more_nodes(config))]


def fitting_changes(config: RunConfig, peak_of: PeakOf) -> str:
    """A sentence that names changes which fit, or says that no simple one does."""
    words = [text for family in _families(config) if (text := _first_fit(config, family, peak_of)) is not None]
    if not words and (together := _first_fit(config, _together(config), peak_of)) is not None:
        words = [together]
    if not words:
        return "No single change makes it fit; `search` lists the plans that do, if there are any."
    return f"Use {', or '.join(words[:_MOST_SHOWN])}; `search` lists all plans that fit."


def _first_fit(config: RunConfig, changes: list[Change], peak_of: PeakOf) -> str | None:
    for change in changes:
        peak = peak_of(changed(config, change))
        if peak is not None:
            new = {key: value for key, value in change.items() if value != _current(config, key)}
            return f"{' '.join(f'{key}={_typed(value)}' for key, value in new.items())} ({gib(peak)})"
    return None


def _current(config: RunConfig, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
