"""The configuration explained: groups with their options, keys with default and unit. `--help` prints these texts.

Everything is read off the schema's docstrings and the first comment of each YAML file, so it cannot differ from them.
Plain strings; nothing is printed here.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from orchestrator.config import keys, locate
from orchestrator.config.schema import Section
from orchestrator.config.suggest import did_you_mean, nearest, nearest_keys
from orchestrator.errors import ConfigError, Problem

_WIDTH = 116


def explain(topic: str, config_directory: Path | None = None) -> str:
    """Help for a group, a section, a key, or an option as GROUP=OPTION. Raises ConfigError for anything else."""
    topic = topic.lstrip("+")
    group, equals, option = topic.partition("=")
    if equals and group in locate.GROUPS:
        return _option_text(group, option, config_directory)
    if topic == "keys":
        return "\n".join(keys.leaf_names())
    parts = []
    if topic in locate.GROUPS:
        parts.append(group_text(topic, config_directory))
    key = keys.find("cluster.gpu" if topic == "gpu" else topic)
    if key is not None:
        parts.append(_section_text(key) if key.is_section else key_text(key))
    if not parts and (file := locate.option_file("experiment", topic, config_directory)) is not None:
        return _file_text("+experiment", topic, file)
    if not parts:
        raise ConfigError(_unknown_topic(topic))
    return "\n\n".join(parts)


def group_text(group: str, config_directory: Path | None = None) -> str:
    """The options of a group, each with its one sentence."""
    offered = locate.options(group, config_directory)
    width = max(len(option) for option in offered)
    lines = [f"{_choice_word(group)}=OPTION, one of:"]
    for option in offered:
        file = locate.option_file(group, option, config_directory)
        text = locate.comment_of(file) if file is not None else ""
        lines += _hanging(f"  {option:<{width}}  ", text)
    if group == "model":
        lines += _hanging("or model=FOLDER: ", "every size from a Hugging Face config.json or from a checkpoint there.")
    return "\n".join(lines)


def groups_text(config_directory: Path | None = None) -> str:
    """Every group on one paragraph with the names of its options."""
    width = max(len(_choice_word(group)) for group in locate.GROUPS)
    lines = []
    for group in locate.GROUPS:
        lines += _hanging(f"  {_choice_word(group):<{width}}  ", ", ".join(locate.options(group, config_directory)))
    return "\n".join(lines)


def key_text(key: keys.Key) -> str:
    """One key: what it takes, its default, what it means."""
    default = "no default, must be given" if key.required else f"default {_default(key.default)}"
    return "\n".join([key.name, *_hanging("    ", f"takes {key.takes}; {default}"), *_hanging("    ", key.doc)])


def _section_text(section: keys.Key) -> str:
    title = f"Keys of {section.name} (KEY=VALUE on the command line; they win over every file):"
    below = [
        key_text(key)
        for name, key in keys.all_keys().items()
        if name.startswith(f"{section.name}.") and not key.is_section
    ]
    return "\n".join([title, *below])


def _option_text(group: str, option: str, config_directory: Path | None) -> str:
    file = locate.option_file(group, option, config_directory)
    if file is None:
        hint = did_you_mean(nearest(option, locate.options(group, config_directory)))
        raise ConfigError(Problem("--help", f"The group {group} has no option `{option}`.", hint))
    return _file_text(_choice_word(group), option, file)


def _file_text(word: str, option: str, file: Path) -> str:
    text = textwrap.indent(file.read_text(encoding="utf-8").rstrip(), "  ")
    return f"{word}={option} ({locate.display(file)}):\n\n{text}"


def _unknown_topic(topic: str) -> Problem:
    found = nearest(topic, [*locate.GROUPS, *locate.options("experiment")]) or nearest_keys(topic, keys.leaf_names())
    return Problem(
        "--help",
        f"There is no group, key, experiment or command `{topic}`.",
        f"{did_you_mean(found)} `--help` lists the groups, `--help keys` every key.".strip(),
    )


def _choice_word(group: str) -> str:
    return "+experiment" if group == "experiment" else group


def _hanging(first: str, text: str) -> list[str]:
    indent = " " * len(first)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [first.rstrip()]


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Section):
        return "see its keys"
    if isinstance(value, tuple):
        return f"[{', '.join(str(entry) for entry in value)}]"
    return str(value) if value != "" else "empty"
