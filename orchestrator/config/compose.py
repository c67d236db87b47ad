"""From words on a command line to one typed `RunConfig`, or to every problem at once. The only room that imports Hydra.

Hydra composes the groups; values of keys are applied here, over everything that files say; pydantic judges types and
`validate.py` judges fields against each other. Raises ConfigError and nothing else for a user's mistake. Next:
`plan/make.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from orchestrator.config import files, keys, locate, resolvers, type_errors, validate
from orchestrator.config.overrides import Assignment, Request, read
from orchestrator.config.schema import RunConfig
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import ConfigError, Problem

DEFAULT_EXPERIMENT = "quickstart"
"""What is composed when no experiment is named."""

LIVE_CLUSTER = "ray"
"""The option of the group `cluster` whose values a live cluster gives."""
_NOBODY_ASKS = Problem(
    "cluster",
    f"`cluster={LIVE_CLUSTER}` stands for what a live Ray cluster has, and nobody asks one here.",
    "Declare the cluster (the command `inventory NAME --write` does), or use it with the commands train, plan, search.",
)

_RESOLUTION_ERRORS = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
"""What an interpolation can make OmegaConf and the resolvers raise."""


AskCluster = Callable[[str, str | None], Mapping[str, Any]]
"""(`cluster.device` and `gpu` as chosen on the command line) -> the `cluster` section of the live cluster; raises
`ConfigError`. Commands bring it along, because this room knows no Ray."""


def load_config(
    overrides: Sequence[str] = (), *, config_directory: str | None = None, ask_cluster: AskCluster | None = None
) -> RunConfig:
    """Compose and validate a configuration.

    `overrides` are Hydra's: `+experiment=llama7b_zero2`, `model=llama3_8b`, `training.steps=20`, `~model.rope_scaling`.
    `config_directory` holds the user's own options, in subfolders named as the groups. Raises ConfigError with every
    problem that was found. `cluster=ray` needs `ask_cluster`, which the commands give.
    """
    examined = examine(overrides, config_directory=config_directory, ask_cluster=ask_cluster)
    if examined.config is None:
        raise ConfigError(examined.problems)
    return examined.config


@dataclass(frozen=True, slots=True)
class Examined:
    """A configuration, or what is wrong with it."""

    config: RunConfig | None
    """The configuration; None when there are problems."""
    problems: tuple[Problem, ...] = ()
    remainder: Callable[[], RunConfig | None] = lambda: None
    """With problems: the configuration without the settings at fault, if there is one; for finding more."""


def examine(
    overrides: Sequence[str] = (), *, config_directory: str | None = None, ask_cluster: AskCluster | None = None
) -> Examined:
    """As `load_config`, but returns the problems. Never raises for a user's mistake."""
    problems = list(locate.check_models_package())
    directory = Path(config_directory).expanduser().absolute() if config_directory is not None else None
    if directory is not None:
        problems += files.check_config_directory(directory)
        directory = directory if directory.is_dir() else None
    request = read(overrides, directory)
    composition = _compose(request, directory, ask_cluster)
    problems += [*request.problems, *composition.problems]
    config, found = _validated(composition)
    known = tuple(problem.key for problem in problems if problem.key)
    problems += [problem for problem in found if not _is_at_or_below(problem.key, known)]
    if not problems:
        return Examined(config)
    return Examined(None, tuple(problems), lambda: _remainder(config, request, problems, directory, ask_cluster))


def _remainder(
    config: RunConfig | None,
    request: Request,
    problems: Sequence[Problem],
    directory: Path | None,
    ask_cluster: AskCluster | None,
) -> RunConfig | None:
    if any(problem.key in locate.GROUPS for problem in problems):
        return None  # with another group than was meant, what follows would mislead
    if config is not None:
        return config
    at_fault = tuple(problem.key for problem in problems if problem.key)
    sound = [
        assignment
        for assignment in request.assignments
        if not any(_is_at_or_below(fault, (assignment.key,)) for fault in at_fault)
    ]
    composition = _compose(Request(request.choices, sound, model=request.model), directory)
    return _validated(composition)[0] if not composition.problems else None


def _is_at_or_below(key: str, parents: Collection[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


@dataclass(slots=True)
class _Composition:
    """What became of a request: plain values, and where they came from."""

    values: dict[str, Any] | None = None
    sources: files.Sources | None = None
    assigned: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def file_that_sets(self, key: str) -> Path | None:
        """The file to blame for a value, None when the command line set it."""
        if self.sources is None or _is_at_or_below(key, self.assigned):
            return None
        return self.sources.file_that_sets(key)


def _compose(request: Request, directory: Path | None, ask_cluster: AskCluster | None = None) -> _Composition:
    """Let Hydra compose the groups, then set the keys."""
    made = _Composition()
    choices = {"experiment": DEFAULT_EXPERIMENT} | request.choices
    try:
        composed, taken = _compose_groups(choices, directory)
    except Exception as error:  # Hydra meets a user's files here and raises what it likes, RecursionError included
        made.problems += files.broken_files(directory, choices)
        if not made.problems and (missing := _missing_option(error, directory)):
            made.problems.append(missing)
        # What is left may come from a file that another one names; those that nobody named come last.
        made.problems += () if made.problems else files.broken_files(directory) or [_composition_problem(error)]
        return made
    if directory is not None and (unusable := files.unusable(taken, directory)):
        made.problems += unusable
        return made
    # The experiment comes last, as in Hydra's composition: the last file that sets a key is the one that counts.
    order = [group for group in reversed(locate.GROUPS) if group in taken]
    made.sources = files.Sources({group: taken[group] for group in order}, directory)
    made.assigned = {assignment.key for assignment in request.assignments}
    made.problems += files.contradictions(made.sources, request.choices, made.assigned)
    if request.model is not None:
        made.assigned.add("model")
        composed["model"] = request.model
    composed = _with_run_section(composed, choices["experiment"])
    if taken.get("cluster") == LIVE_CLUSTER:
        made.problems += _take_live_cluster(composed, made.sources, request, ask_cluster)
    if "gpu" in request.choices and isinstance(OmegaConf.select(composed, "cluster.gpu"), str):
        # A cluster of the user's own names its GPU in its body; the name on the command line replaces that name.
        composed.cluster.gpu = request.choices["gpu"]
    made.problems += _resolve_gpu_names(composed, directory)
    for assignment in request.assignments:
        made.problems += _assign(composed, assignment)
    made.problems += _resolve_gpu_names(composed, directory)
    _one_length_replaces_the_other(composed, made.assigned)
    made.values, unresolved = _plain(composed, made)
    made.problems += unresolved
    return made


def _compose_groups(choices: Mapping[str, str], directory: Path | None) -> tuple[DictConfig, Mapping[str, str]]:
    """(what the files say, option taken of each group). Raises whatever Hydra raises."""
    words = tuple(
        f"{'+' if group == 'experiment' else ''}{group}={_quoted(option)}" for group, option in choices.items()
    )
    values, taken = _hydra_compose(words, directory, locate.stamp(directory))
    return OmegaConf.create(values), taken


@lru_cache(maxsize=64)
def _hydra_compose(
    words: tuple[str, ...], directory: Path | None, _stamp: object
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Plain values, interpolations unresolved. Kept until a file changes: sweeps compose the same files again."""
    resolvers.register()
    if directory is not None:
        words = (*words, f"hydra.searchpath=[{_quoted(f'file://{directory}')}]")
    with initialize_config_dir(config_dir=str(locate.shipped_directory()), version_base="1.3", job_name="orchestrator"):
        composed = compose("config", overrides=list(words), return_hydra_config=True)
    taken = {
        str(group).partition("@")[0]: str(option)
        for group, option in composed.hydra.runtime.choices.items()
        if not str(group).startswith("hydra")
    }
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}, taken


def _take_live_cluster(
    composed: DictConfig, sources: files.Sources, request: Request, ask: AskCluster | None
) -> list[Problem]:
    """Put what the live cluster says under what files and the command line say of `cluster`."""
    device = next((str(item.value) for item in request.assignments if item.key == "cluster.device"), "cuda")
    try:
        if ask is None:
            raise ConfigError(_NOBODY_ASKS)
        live = ask(device, request.choices.get("gpu"))
    except ConfigError as error:
        # Something in its place, so that what else is wrong is found; it is never planned for.
        composed.cluster = OmegaConf.create({"device": "cpu", "gpu": {"name": "CPU", "memory_gib": 1}})
        return [replace(problem, key=problem.key or "cluster") for problem in error.problems]
    own = {key: OmegaConf.select(composed, key) for key in sources.set_by_experiment("cluster")}
    composed.cluster = OmegaConf.create(dict(live))
    for key, value in own.items():
        OmegaConf.update(composed, key, value, merge=True, force_add=True)
    return []


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _missing_option(error: BaseException, directory: Path | None) -> Problem | None:
    """What to say when a defaults list names an option that is not there; Hydra's own words list its search path."""
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    group, _, option = (missing or "").lstrip("/").partition("/")
    if group not in locate.GROUPS or not option:
        return None
    offered = locate.options(group, directory)
    hint = did_you_mean(nearest(option, offered))
    return Problem(
        group,
        f"A file's defaults list names `{group}: {option}`, and there is no such option.",
        f"{hint} Choose one of: {', '.join(offered)}; or write {group}/{option}.yaml beside it.".strip(),
    )


def _composition_problem(error: BaseException) -> Problem:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Problem(
        "",
        "The configuration files do not compose: " + " ".join(lines or [type(error).__name__]).rstrip(".") + ".",
        "Mend the file that is named; the form of a defaults list is shown by any file in conf/experiment/.",
    )


def _with_run_section(composed: DictConfig, experiment: str) -> DictConfig:
    if not isinstance(composed.get("run"), DictConfig):
        composed["run"] = {}
    composed.run["experiment"] = experiment
    return composed


def _assign(composed: DictConfig, assignment: Assignment) -> list[Problem]:
    try:
        if assignment.delete:
            parent, _, last = assignment.key.rpartition(".")
            node = OmegaConf.select(composed, parent) if parent else composed
            if isinstance(node, DictConfig):
                node[last] = None  # popping would resolve an interpolation, and this one may be why it is deleted
                node.pop(last)
        else:
            OmegaConf.update(composed, assignment.key, assignment.value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [
            Problem(assignment.key, f"`{assignment.text}` cannot be applied: {first}.", "Set the whole value instead.")
        ]
    return []


def _one_length_replaces_the_other(composed: DictConfig, assigned: set[str]) -> None:
    """`training.steps` given on the command line replaces a file's `tokens`, and the other way round."""
    training = composed.get("training")
    if not isinstance(training, DictConfig):
        return
    for given, other in (("steps", "tokens"), ("tokens", "steps")):
        if f"training.{given}" in assigned and f"training.{other}" not in assigned and training.get(given) is not None:
            training[other] = None


def _resolve_gpu_names(composed: DictConfig, directory: Path | None) -> list[Problem]:
    """Put the entry of `conf/gpu/` in the place of its name, in `cluster.gpu` and in every node group."""
    places: list[tuple[str, Any]] = [("cluster.gpu", OmegaConf.select(composed, "cluster.gpu", throw_on_missing=False))]
    groups = OmegaConf.select(composed, "cluster.node_groups")
    for index in range(len(groups) if OmegaConf.is_list(groups) else 0):
        entry = groups[index]
        if isinstance(entry, DictConfig):
            places.append((f"cluster.node_groups.{index}.gpu", entry.get("gpu")))
    problems = []
    for key, name in places:
        if not isinstance(name, str):
            continue
        file = locate.option_file("gpu", name, directory)
        body = files.read_body(file) if file is not None else None
        if isinstance(body, Problem):
            problems.append(body)
        elif body is None:
            offered = locate.options("gpu", directory)
            hint = did_you_mean(nearest(name, offered))
            problems.append(
                Problem(key, f"There is no GPU `{name}` in conf/gpu/.", f"{hint} Known: {', '.join(offered)}.".strip())
            )
        else:
            OmegaConf.update(composed, key, body, merge=False, force_add=True)
    return problems


def _plain(composed: DictConfig, made: _Composition) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Plain values, interpolations resolved; what cannot be resolved, or is left open, is taken out and told."""
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    problems = []
    for key, value in files.flatten({str(name): entry for name, entry in raw.items()}):
        if value == "???":
            problems.append(
                Problem(key, "It is left open (`???`) in the files and must be given.", f"Give {key}=VALUE.")
            )
        elif "${" in str(value):
            try:
                _resolved(composed, key)
                continue
            except _RESOLUTION_ERRORS as error:
                problems.append(_unresolved(key, error, made.file_that_sets(key)))
        else:
            continue
        _assign(composed, Assignment(key, None, key, delete=True))
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
    except _RESOLUTION_ERRORS as error:
        return None, [*problems, _composition_problem(error)]
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}, problems


def _resolved(composed: DictConfig, key: str) -> None:
    """Resolve one value. Raises one of `_RESOLUTION_ERRORS` when it cannot be."""
    node: Any = composed
    for part in key.split("."):
        node = node[part]
    if OmegaConf.is_config(node):
        OmegaConf.to_container(node, resolve=True)


_MISSING_KEY = re.compile(r"Interpolation key '([\w.]+)' not found")
"""OmegaConf's words for a reference to a key that has no value."""


def _unresolved(key: str, error: BaseException, file: Path | None) -> Problem:
    where = f" in {locate.display(file)}" if file else ""
    first = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    named = _MISSING_KEY.search(first)
    if named and keys.find(named[1]) is not None:
        return Problem(
            key,
            f"Its value{where} is taken from {named[1]}, which nothing sets.",
            f"Set {named[1]}=VALUE, or write it into the file of the option that was chosen.",
        )
    return Problem(
        key,
        f"Its value{where} refers to something that cannot be found: {first}.",
        "Name a dotted key as ${section.key}, or a variable as ${oc.env:NAME}.",
    )


def _validated(composition: _Composition) -> tuple[RunConfig | None, list[Problem]]:
    if composition.values is None:
        return None, []
    try:
        config = RunConfig.model_validate(composition.values)
    except ValidationError as error:
        return None, type_errors.to_problems(error, composition.file_that_sets)
    return config, list(validate.problems_of(config))
