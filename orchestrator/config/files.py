"""The YAML files of a configuration: whether they can be read, where each value came from, and where two disagree.

Refuses broken YAML, files that are no map, files of the user's that hide behind shipped ones, and a group chosen on the
command line whose values a body would silently replace. Reads files; composing them is `compose.py`'s business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config import locate
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import Problem


def read_body(file: Path) -> dict[str, Any] | Problem:
    """What a YAML file says apart from its defaults list, interpolations unresolved; or why it cannot be read."""
    shown = locate.display(file)
    try:
        with file.open(encoding="utf-8") as stream:
            is_map = isinstance(yaml.compose(stream, Loader=yaml.SafeLoader), yaml.MappingNode | None)
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if is_map else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = " ".join(str(error.problem or error.context).split())
        return Problem("", f"{shown}{where} is not valid YAML: {what}.", "Mend that line.")
    except UnicodeDecodeError:
        return Problem("", f"{shown} is not UTF-8 text.", "Save it as UTF-8.")
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        return Problem("", f"{shown} cannot be read: {_first_line(error)}.", "Mend the file.")
    if not isinstance(loaded, dict):
        return Problem("", f"{shown} does not hold a map of keys to values.", "Write lines such as `key: value`.")
    body = {str(key): value for key, value in loaded.items()}
    body.pop("defaults", None)
    return body


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested maps; an empty map is a value."""
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from flatten({str(inner): entry for inner, entry in value.items()}, key)
        else:
            yield key, value


class Sources:
    """The files that were composed, and which of them says what."""

    def __init__(self, choices: Mapping[str, str], config_directory: Path | None) -> None:
        self.group_of: dict[Path, str] = {}
        """The group of each file, in the order of composition."""
        for group, option in choices.items():
            file = locate.option_file(group, option, config_directory) if group in locate.GROUPS else None
            if file is not None:
                self.group_of[file] = group

    @cached_property
    def values(self) -> dict[Path, dict[str, Any]]:
        """Of each file the dotted keys that it sets. Read when first needed: most configurations are right."""
        found = {}
        for file, group in self.group_of.items():
            body = read_body(file)
            if isinstance(body, dict):
                found[file] = dict(flatten(body, locate.PACKAGES[group]))
        return found

    def file_that_sets(self, key: str) -> Path | None:
        """The file whose value of a dotted key (or of a key below it) counts: the last that sets it."""
        found = None
        for file, values in self.values.items():
            if any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in values):
                found = file
        return found

    def set_by_experiment(self, section: str) -> list[str]:
        """Dotted keys below `section` that the experiment's own body sets."""
        return [
            key
            for file, values in self.values.items()
            if self.group_of[file] == "experiment"
            for key in values
            if key.startswith(f"{section}.")
        ]


def contradictions(sources: Sources, chosen: Mapping[str, str], assigned: set[str]) -> list[Problem]:
    """Groups chosen on the command line whose values another file replaces, and keys on the command line do not settle.

    Hydra lets an experiment's body (and a cluster's own `gpu:`) win over a group chosen on the command line.
    """
    problems = []
    for group, option in chosen.items():
        if group == "experiment":
            continue
        own_file = next((file for file, name in sources.group_of.items() if name == group), None)
        if own_file is None:
            continue
        for file, values in sources.values.items():
            if file == own_file or sources.group_of.get(file) not in ("experiment", "cluster"):
                continue
            for key, wanted in sources.values.get(own_file, {}).items():
                other = _value_over(values, key)
                if other is None or other[1] == wanted or _settled(key, assigned):
                    continue
                if other[0] == "cluster.gpu" and isinstance(other[1], str):  # a name gives way to a name
                    continue
                problems.append(_contradiction(group, option, key, wanted, file, other))
    return problems


def _contradiction(group: str, option: str, key: str, wanted: Any, file: Path, other: tuple[str, Any]) -> Problem:
    shown = locate.display(file)
    return Problem(
        key,
        f"`{group}={option}` on the command line sets it to {wanted!r}, but {shown} sets {other[0]} to {other[1]!r}, "
        "which would silently win.",
        f"Say which one you mean with `{key}={'null' if wanted is None else wanted}`, leave out `{group}={option}`, "
        f"or take {other[0]} out of {shown} (as a choice in its defaults list it could be overridden).",
    )


def _value_over(values: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """The entry that decides a key: the key itself, or a parent that is set to a value."""
    for name, value in values.items():
        if key == name or key.startswith(f"{name}."):
            return name, value
    return None


def _settled(key: str, assigned: set[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in assigned)


def check_config_directory(directory: Path) -> list[Problem]:
    """What is wrong with the user's own folder as a whole: missing, unknown groups, files that would be ignored."""
    if not directory.is_dir():
        return [
            Problem(
                "--config-dir",
                f"{directory} is not a folder.",
                "Give a folder with subfolders named as the groups, for example DIR/experiment/mine.yaml.",
            )
        ]
    problems = []
    root = locate.shipped_directory()
    for file in sorted(directory.glob("*.yaml")) + sorted(directory.glob("*/*.yaml")):
        relative = file.relative_to(directory)
        if len(relative.parts) == 1:
            problems.append(
                Problem(
                    "--config-dir",
                    f"{file} lies in no group, so nothing would read it.",
                    "Move it into a subfolder named as a group, for example experiment/.",
                )
            )
        elif relative.parts[0] not in locate.GROUPS:
            hint = did_you_mean(nearest(relative.parts[0], locate.GROUPS))
            problems.append(
                Problem(
                    "--config-dir",
                    f"{file}: `{relative.parts[0]}` is not a configuration group.",
                    f"{hint} The groups are {', '.join(locate.GROUPS)}.".strip(),
                )
            )
        elif (root / relative).is_file():
            problems.append(
                Problem(
                    "--config-dir",
                    f"{file} has the name of a shipped option and would be ignored.",
                    "Give it a name of its own.",
                )
            )
    return problems


def unusable(taken: Mapping[str, str], directory: Path) -> list[Problem]:
    """What Hydra would silently misread in the user's own files that were taken: no map, values at another place."""
    problems = []
    for group, option in taken.items():
        file = directory / group / f"{option}.yaml"
        if group not in locate.GROUPS or not file.is_file():
            continue
        body = read_body(file)
        if isinstance(body, Problem):
            problems.append(body)
        elif locate.PACKAGES[group] != group and not _says_its_place(file):
            package = locate.PACKAGES[group] or "_global_"
            problems.append(
                Problem(
                    group,
                    f"{file}: its values would land under `{group}`.",
                    f"Put `# @package {package}` into its first line.",
                )
            )
    return problems


def _says_its_place(file: Path) -> bool:
    comments = itertools.takewhile(
        lambda line: not line.strip() or line.startswith("#"), file.read_text(encoding="utf-8").splitlines()
    )
    return any("@package" in line for line in comments)


def broken_files(config_directory: Path | None, wanted: Mapping[str, str] | None = None) -> list[Problem]:
    """Every file of the configuration that cannot be read; with `wanted`, only those that a composition would take."""
    problems = []
    for directory in (locate.shipped_directory(), config_directory):
        if directory is None:
            continue
        for file in sorted(directory.glob("**/*.yaml")):
            group = file.parent.name
            if wanted is not None and wanted.get(group) != file.stem:
                continue
            body = read_body(file)
            if isinstance(body, Problem):
                problems.append(body)
    return problems


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
