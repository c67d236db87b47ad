"""What was typed, taken apart: the command, the flags, the overrides. Pure; `main.py` acts on it.

Everything that is no flag and comes after the command is an override in Hydra's grammar and is left for
`config/compose.py` to judge. Problems are collected, to be shown together with those of the configuration.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.config.schema import RunConfig
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import ConfigError, Problem

DEFAULT_COMMAND = "train"

FLAGS = ("--help", "--version", "--json", "--multirun", "--cfg", "--config-dir")
VALUE_FLAGS = ("--dtype", "--max-shard-size", "--tokenizer", "--last", "--html")
"""Flags of single commands that take a value: `--dtype bf16` or `--dtype=bf16`."""
CLUSTER_FLAGS = ("--address", "--device", "--env", "--python")
"""The same, of commands that speak with a cluster."""
SWITCHES = ("--write", "--no-wait")
"""Flags of single commands that take none; given, they stand in `options` with an empty value."""
_SHORT = {"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir", "-V": "--version"}
_BARE_WORD = re.compile(r"[A-Za-z][\w-]*")


@dataclass(slots=True)
class Invocation:
    """One command line."""

    command: str = DEFAULT_COMMAND
    command_was_given: bool = False
    overrides: list[str] = field(default_factory=list)
    help: bool = False
    help_topic: str | None = None
    version: bool = False
    json: bool = False
    multirun: bool = False
    show_config: bool = False
    config_directory: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    """Values of `VALUE_FLAGS` and `CLUSTER_FLAGS` that were given, and the `SWITCHES`."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def asked(self) -> str:
        """What was asked for, in the user's words: `verify`, `checkpoint import`."""
        second = self.overrides[:1] if self.command == "checkpoint" else []
        return " ".join([self.command, *second])

    def load(self, overrides: Sequence[str] | None = None) -> RunConfig:
        """The configuration that was asked for. Raises ConfigError with its problems and those of the command line."""
        from orchestrator.cli.live import ask_cluster
        from orchestrator.config.compose import load_config
        from orchestrator.tracking.identity import problems_of_asked_name

        try:
            config = load_config(
                self.overrides if overrides is None else overrides,
                config_directory=self.config_directory,
                ask_cluster=ask_cluster(self.config_directory),
            )
        except ConfigError as error:
            raise ConfigError([*self.problems, *error.problems]) from None
        if problems := [*self.problems, *problems_of_asked_name(config)]:
            raise ConfigError(problems)
        return config

    def words(self, command: str, overrides: Sequence[str] | None = None) -> str:
        """The command line that does `command` for the same configuration (or for other overrides)."""
        place = ["--config-dir", self.config_directory] if self.config_directory is not None else []
        said = [*(self.overrides if overrides is None else overrides), *place]
        return " ".join(["python -m orchestrator", command, *map(shlex.quote, said)])


def parse(words: Sequence[str]) -> Invocation:
    """Take a command line (without the program's name) apart. Never raises."""
    made = Invocation()
    rest = list(words)
    seen_first = False
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and word != "-":
            _take_flag(made, word, rest)
        elif not seen_first and _BARE_WORD.fullmatch(word):
            made.command, made.command_was_given, seen_first = word, True, True
        else:
            made.overrides.append(word)
            seen_first = True
    return made


def _take_flag(made: Invocation, word: str, rest: list[str]) -> None:
    name, equals, value = word.partition("=")
    flag = _SHORT.get(name, name)
    attached = value if equals else None
    if flag == "--help":
        made.help = True
        made.help_topic = attached or _optional(rest)
    elif flag == "--version":
        made.version = True
    elif flag == "--json":
        made.json = True
    elif flag == "--multirun":
        made.multirun = True
    elif flag == "--cfg":
        made.show_config = True
        asked = attached if equals else _value(rest)
        if asked != "job":
            made.problems.append(
                Problem(
                    "--cfg", f"`--cfg {asked or ''}` is not offered: only the job is configured.", "Write --cfg job."
                )
            )
    elif flag == "--config-dir":
        made.config_directory = attached if equals else _value(rest)
        if not made.config_directory:
            made.config_directory = None
            made.problems.append(Problem("--config-dir", "No folder was given.", "Write --config-dir FOLDER."))
    elif flag in SWITCHES and not equals:
        made.options[flag] = ""
    elif flag in (*VALUE_FLAGS, *CLUSTER_FLAGS):
        given = attached if equals else _value(rest)
        if given:
            made.options[flag] = given
        else:
            made.problems.append(Problem(flag, "No value was given.", f"Write {flag} VALUE."))
    else:
        known = (*FLAGS, *VALUE_FLAGS, *CLUSTER_FLAGS, *SWITCHES)
        hint = did_you_mean(nearest(name, known))
        made.problems.append(
            Problem(name, f"There is no flag `{word}`.", f"{hint} The flags are {', '.join(known)}.".strip())
        )


def _optional(rest: list[str]) -> str | None:
    """The next word, when it can be a topic of help."""
    if rest and not rest[0].startswith(("-", "~")):
        return rest.pop(0)
    return None


def _value(rest: list[str]) -> str | None:
    return rest.pop(0) if rest and not rest[0].startswith("-") else None
