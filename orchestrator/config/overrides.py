"""What was typed on the command line, read one word at a time: group choices, values of keys, deletions.

Refuses, each with its own problem and without stopping at the first: what Hydra's grammar cannot read, unknown keys,
groups and options, sweeps outside `-m`, the same thing said twice, Hydra's own settings. `compose.py` applies the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException

from orchestrator.config import keys, locate
from orchestrator.config.model_folder import FolderError, means_folder, model_of
from orchestrator.config.suggest import did_you_mean, nearest, nearest_keys
from orchestrator.config.urls import is_url
from orchestrator.errors import Problem


@dataclass(frozen=True, slots=True)
class Assignment:
    """A key that is set on the command line, or deleted back to the schema's default."""

    key: str
    value: Any
    text: str
    """The word as it was typed."""
    delete: bool = False


@dataclass(slots=True)
class Request:
    """Everything that was typed, sorted by kind."""

    choices: dict[str, str] = field(default_factory=dict)
    """Chosen option of each group, `experiment` included."""
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    model: dict[str, Any] | None = None
    """All of `model.*`, from a folder that `model=` names; None: from an option."""


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def read(words: Sequence[str], config_directory: Path | None) -> Request:
    """Read overrides such as `+experiment=x`, `model=y`, `training.steps=3`, `~model.rope_scaling`. Never raises."""
    request = Request()
    typed: dict[str, str] = {}
    for word in words:
        parsed = parse(word)
        if isinstance(parsed, Problem):
            request.problems.append(parsed)
            continue
        problem = _place(parsed, word, request, typed, config_directory)
        if problem is not None:
            request.problems.append(problem)
    return request


def parse(word: str) -> Override | Problem:
    """One word in Hydra's grammar, or what is wrong with it."""
    try:
        parsed = _parser().parse_override(word)
        if not parsed.is_sweep_override():
            parsed.value()
    except (HydraException, ValueError, RecursionError) as error:
        if (quoted := _with_quotes(word)) is not None:
            return parse(quoted)
        return _unreadable(word, str(error))
    if not parsed.key_or_group:
        return _unreadable(word, "")
    return parsed


_GRAMMAR = "()[]{},='\"\\$"
"""Signs that mean something in a value that is not quoted."""


def _with_quotes(word: str) -> str | None:
    """The word with its value quoted, where that can only mean what was typed: it has none of the grammar's own signs,
    and so is a text with letters that the grammar does not know (`~/texts`, `Größe`)."""
    name, equals, value = word.partition("=")
    if not equals or not value or any(letter in _GRAMMAR or not letter.isprintable() for letter in value):
        return None
    return f"{name}='{value}'"


def _unreadable(word: str, reason: str) -> Problem:
    name, equals, value = word.partition("=")
    name = name.lstrip("+~")
    if not word.strip():
        return Problem("", "An empty word was given where a setting is expected.", "Leave it out.")
    if not equals:
        group = f" Groups are chosen as {name}=OPTION." if name in locate.GROUPS else ""
        fix = _meant_as_option(name) or f"Write {word}=VALUE.{group}"
        return Problem(name, f"`{word}` is not a setting: there is no `=`.", fix)
    if not name:
        return Problem("", f"`{word}` has no key before the `=`.", "Write KEY=VALUE.")
    key = keys.find(name)
    if key is None and name not in locate.GROUPS:
        return _unknown_key(name)
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return Problem(
        name,
        f"The value `{value}` cannot be read ({reason.splitlines()[0] if reason else 'it is not complete'}).",
        "Close its brackets and quotes; a value that contains ( ) [ ] { } , = or quotes is itself quoted: "
        f"\"{name}='{quoted}'\".",
    )


def _place(
    parsed: Override, word: str, request: Request, typed: dict[str, str], config_directory: Path | None
) -> Problem | None:
    name = parsed.key_or_group
    if parsed.is_hydra_override() or name.partition(".")[0].partition("/")[0] == "hydra":
        return Problem(
            name,
            f"`{word}` would change Hydra itself, which only composes here and neither logs nor makes folders.",
            "Leave it out; the run's folder is set with run.directory and run.name.",
        )
    if parsed.package is not None:
        return Problem(name, f"`{word}` moves a group to another place with `@`.", f"Write {name}=OPTION.")
    if parsed.is_sweep_override():
        return Problem(
            name,
            f"`{word}` gives several values, but this command runs one configuration.",
            f"Give one value, add -m to train each in turn, or write a list as {name}=[...] and a text with commas "
            "in quotes.",
        )
    group = _as_group(parsed)
    if group is not None:
        return _place_choice(group, parsed, word, request, typed, config_directory)
    return _place_assignment(parsed, word, request, typed)


def _as_group(parsed: Override) -> str | None:
    name = parsed.key_or_group
    if name in locate.GROUPS:
        return name
    if name == "cluster.gpu" and isinstance(parsed.value(), str) and parsed.type != OverrideType.DEL:
        return "gpu"
    return None


def _place_choice(
    group: str, parsed: Override, word: str, request: Request, typed: dict[str, str], config_directory: Path | None
) -> Problem | None:
    offered = locate.options(group, config_directory)
    if parsed.type == OverrideType.DEL:
        return Problem(group, f"`{word}` would leave the group {group} without a choice.", _choose_from(group, offered))
    value = parsed.value()
    option = word.partition("=")[2].strip() if isinstance(value, int | float) else value
    if not isinstance(option, str) or not option:
        package = locate.PACKAGES[group]
        single = f" Single values are set as {package}.KEY=VALUE." if package else ""
        return Problem(group, f"`{word}` does not name an option of the group.", _choose_from(group, offered) + single)
    if group in typed:
        return Problem(
            group,
            f"Two choices are made for one group: `{typed[group]}` and `{word}`.",
            "Keep one of them."
            + (" An experiment of your own can combine several (see --config-dir)." if group == "experiment" else ""),
        )
    typed[group] = word
    if group == "model" and option not in offered and means_folder(option):
        return _place_model(option, request)
    if option not in offered:
        return _unknown_option(group, option, offered, config_directory)
    request.choices[group] = option
    return None


def _place_model(option: str, request: Request) -> Problem | None:
    """Take the sizes of the model in a folder, in place of those of an option."""
    if is_url(option):
        return Problem(
            "model",
            f"`model={option}` is in an object store, and sizes are read from a folder of this machine.",
            f"Copy its config.json (of a checkpoint: manifest.json) into a folder and give that; the weights can stay "
            f"there, with checkpoint.init_from={option}.",
        )
    try:
        request.model = model_of(Path(option).expanduser()).model_dump()
    except FolderError as error:
        return Problem(
            "model",
            f"`model={option}` names a folder, and no model can be read from it: {error}.",
            "Give a Hugging Face folder with a config.json of a model that is implemented, a checkpoint, or an option "
            "(`--help model` lists them).",
        )
    return None


def _meant_as_option(name: str) -> str:
    """What to write where a shipped option was named without its group; empty where there is none of that name."""
    groups = [group for group in locate.GROUPS if name in locate.options(group)]
    written = [f"{'+' * (group == 'experiment')}{group}={name}" for group in groups]
    return f"Did you mean {' or '.join(written)}?" if written else ""


def _unknown_option(group: str, option: str, offered: list[str], config_directory: Path | None) -> Problem:
    hint = did_you_mean(nearest(option, offered))
    if not hint and (option.isdigit() or option == "auto"):
        hint = did_you_mean([f"{name}={option}" for name in keys.leaf_names() if name.endswith(f".{group}")])
    extra = ""
    if config_directory is not None and (config_directory / group / f"{option}.yml").is_file():
        extra = f" {config_directory / group / option}.yml is not read: rename it to {option}.yaml."
    what = "experiment" if group == "experiment" else f"option of the group {group}"
    return Problem(
        group,
        f"There is no {what} `{option}`.{extra}",
        f"{hint + ' ' if hint else ''}{_choose_from(group, offered)} To add one, write {group}/{option}.yaml in a "
        "folder of your own and name it with --config-dir.",
    )


def _choose_from(group: str, offered: Sequence[str]) -> str:
    prefix = "+experiment" if group == "experiment" else group
    return f"Choose {prefix}= one of: {', '.join(offered)}."


def _place_assignment(parsed: Override, word: str, request: Request, typed: dict[str, str]) -> Problem | None:
    name = parsed.key_or_group
    key = keys.find(name)
    if key is None:
        return _unknown_key(name)
    if name == "run.experiment":
        return Problem(name, f"`{word}`: the experiment's name follows from its choice.", "Write +experiment=NAME.")
    for earlier in typed:
        if earlier == name or earlier.startswith(f"{name}."):
            return Problem(name, f"It is set twice: `{typed[earlier]}` and `{word}`.", "Keep one of them.")
    typed[name] = word
    if parsed.type == OverrideType.DEL:
        request.assignments.append(Assignment(name, None, word, delete=True))
        return None
    value = parsed.value()
    if isinstance(value, bool | int | float) and keys.accepts_text(key.annotation):
        value = word.partition("=")[2].strip()  # a run named 007 is not named 7
    if value == "":
        null = " For none write null." if "null" in key.takes else ""
        return Problem(name, f"`{word}` gives no value; {key.takes} is needed.", f"Write {name}=VALUE.{null}")
    request.assignments.append(Assignment(name, value, word))
    return None


def _unknown_key(name: str) -> Problem:
    head, _, rest = name.partition(".")
    if head in ("gpu", "experiment") and rest:
        name_there = f"cluster.gpu.{rest}" if head == "gpu" else rest
        if keys.find(name_there) is not None:
            return Problem(name, f"There is no key `{name}`.", f"Did you mean `{name_there}`?")
    parent = _deepest_known(name)
    found = nearest_keys(name, keys.leaf_names()) or nearest(name, locate.GROUPS)
    if parent is not None and not parent.is_section:
        return Problem(name, f"`{parent.name}` is a single value ({parent.takes}); nothing lies below it.", "")
    look = f"`--help {parent.name.partition('.')[0]}` lists the keys there." if parent else "`--help` lists all groups."
    hint = did_you_mean(found)
    return Problem(name, f"There is no key `{name}`.", f"{hint} {look}".strip())


def _deepest_known(name: str) -> keys.Key | None:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found = keys.find(".".join(parts[:length]))
        if found is not None:
            return found
    return None


def sweep_values(word: str, options_of: Callable[[str], Sequence[str]]) -> tuple[str, ...] | None:
    """The single overrides that a sweep stands for; None for a word that is no sweep (or cannot be read)."""
    parsed = parse(word)
    if isinstance(parsed, Problem) or not parsed.is_sweep_override():
        return None
    start = word.partition("=")[0]
    pattern = parsed.value()
    if isinstance(pattern, Glob):
        group = _group_of_name(parsed.key_or_group)
        return tuple(f"{start}={option}" for option in pattern.filter(list(options_of(group)))) if group else ()
    return tuple(f"{start}={value}" for value in parsed.sweep_string_iterator())


def _group_of_name(name: str) -> str | None:
    return "gpu" if name == "cluster.gpu" else name if name in locate.GROUPS else None
