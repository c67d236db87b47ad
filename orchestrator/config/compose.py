"""From words on a command line to one typed `RunConfig`, or to every problem at once. The only room that imports Hydra.

Hydra composes the groups; values of keys are applied here, over everything that files say; pydantic judges types and
`validate.py` judges fields against each other. Raises ConfigError and nothing else for a user's mistake. Next: `plan/make.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from orchestrator.config import files, locate, resolvers, type_errors, validate
from orchestrator.config.overrides import Assignment, Request, read
from orchestrator.config.schema import RunConfig
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import ConfigError, Problem

DEFAULT_EXPERIMENT = "quickstart"
"""What is composed when no experiment is named."""

_COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError)
"""What a user's files can make Hydra raise."""


def load_config(overrides: Sequence[str] = (), *, config_directory: str | None = None) -> RunConfig:
    """Compose and validate a configuration.

    `overrides` are Hydra's: `+experiment=llama7b_zero2`, `model=llama3_8b`, `training.steps=20`, `~model.rope_scaling`.
    `config_directory` holds the user's own options, in subfolders named as the groups. Raises ConfigError with every
    problem that was found.
    """
    problems = list(locate.check_models_package())
    directory = Path(config_directory).expanduser().absolute() if config_directory is not None else None
    if directory is not None:
        problems += files.check_config_directory(directory)
        directory = directory if directory.is_dir() else None
    request = read(overrides, directory)
    problems += request.problems
    composition = _compose(request, directory)
    problems += composition.problems
    config, found = _validated(composition)
    known = {problem.key for problem in problems if problem.key}
    problems += [problem for problem in found if problem.key not in known]
    if problems or config is None:
        raise ConfigError(problems)
    return config


@dataclass(slots=True)
class _Composition:
    """What became of a request: plain values, and where they came from."""

    values: dict[str, Any] | None = None
    sources: files.Sources | None = None
    assigned: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def file_that_sets(self, key: str) -> Path | None:
        """The file to blame for a value, None when the command line set it."""
        if self.sources is None or any(key == name or key.startswith(f"{name}.") for name in self.assigned):
            return None
        return self.sources.file_that_sets(key)


def _compose(request: Request, directory: Path | None) -> _Composition:
    """Let Hydra compose the groups, then set the keys."""
    made = _Composition()
    choices = {"experiment": DEFAULT_EXPERIMENT} | request.choices
    try:
        composed = _hydra_compose(choices, directory)
    except _COMPOSITION_ERRORS as error:
        made.problems += files.broken_files(directory, choices) or files.broken_files(directory)
        if not made.problems:
            made.problems.append(_composition_problem(error))
        return made
    taken: dict[str, str] = {
        str(group).partition("@")[0]: str(option)
        for group, option in composed.hydra.runtime.choices.items()
        if not str(group).startswith("hydra")
    }
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    # The experiment comes last, as in Hydra's composition: the last file that sets a key is the one that counts.
    order = [group for group in reversed(locate.GROUPS) if group in taken]
    made.sources = files.Sources({group: taken[group] for group in order}, directory)
    made.assigned = {assignment.key for assignment in request.assignments}
    made.problems += files.contradictions(made.sources, request.choices, made.assigned)
    composed = _with_run_section(composed, choices["experiment"])
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


def _hydra_compose(choices: Mapping[str, str], directory: Path | None) -> DictConfig:
    resolvers.register()
    words = [f"{'+' if group == 'experiment' else ''}{group}={_quoted(option)}" for group, option in choices.items()]
    if directory is not None:
        words.append(f"hydra.searchpath=[{_quoted(f'file://{directory}')}]")
    with initialize_config_dir(config_dir=str(locate.shipped_directory()), version_base="1.3", job_name="orchestrator"):
        return compose("config", overrides=words, return_hydra_config=True)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


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
                node.pop(last, None)
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
    """Plain values with every interpolation resolved, or which of them cannot be."""
    problems = []
    for key in _interpolated(composed):
        try:
            OmegaConf.select(composed, key, throw_on_resolution_failure=True)
        except (OmegaConfBaseException, RecursionError, ValueError, TypeError) as error:
            file = made.file_that_sets(key)
            where = f" in {locate.display(file)}" if file else ""
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(
                Problem(
                    key,
                    f"Its value{where} refers to something that cannot be found: {first.rstrip('.')}.",
                    "Name a dotted key as ${section.key} or a variable as ${oc.env:NAME}; quote a $ that is meant as text.",
                )
            )
    if problems:
        return None, problems
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError) as error:
        return None, [_composition_problem(error)]
    values = {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}
    missing = [key for key, value in files.flatten(values) if value == "???"]
    problems = [
        Problem(key, "It is left open (`???`) in the files and must be given.", f"Give {key}=VALUE.") for key in missing
    ]
    return (None if problems else values), problems


def _interpolated(composed: DictConfig) -> list[str]:
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    return [key for key, value in files.flatten({str(k): v for k, v in raw.items()}) if "${" in str(value)]


def _validated(composition: _Composition) -> tuple[RunConfig | None, list[Problem]]:
    if composition.values is None:
        return None, []
    try:
        config = RunConfig.model_validate(composition.values)
    except ValidationError as error:
        return None, type_errors.to_problems(error, composition.file_that_sets)
    return config, list(validate.problems_of(config))
