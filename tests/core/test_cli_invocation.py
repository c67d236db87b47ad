"""A command line taken apart: command, flags, overrides."""

from __future__ import annotations

import pytest

from orchestrator.cli.invocation import Invocation, parse


@pytest.mark.parametrize(
    ("words", "command", "overrides"),
    [
        ([], "train", []),
        (["training.steps=1"], "train", ["training.steps=1"]),
        (["plan", "+experiment=x"], "plan", ["+experiment=x"]),
        (["--json", "plan", "a=1"], "plan", ["a=1"]),
        (["a=1", "plan"], "train", ["a=1", "plan"]),
        (["~model.head_dim"], "train", ["~model.head_dim"]),
        (["plan", "--", "a=1"], "plan", ["a=1"]),
    ],
)
def test_the_first_bare_word_is_the_command(words: list[str], command: str, overrides: list[str]) -> None:
    made = parse(words)
    assert (made.command, made.overrides) == (command, overrides)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--json"], "json", True),
        (["-m"], "multirun", True),
        (["--multirun"], "multirun", True),
        (["--version"], "version", True),
        (["--cfg", "job"], "show_config", True),
        (["--cfg=job"], "show_config", True),
        (["-c", "job"], "show_config", True),
        (["--config-dir", "d"], "config_directory", "d"),
        (["--config-dir=d"], "config_directory", "d"),
        (["-cd", "d"], "config_directory", "d"),
        (["-h"], "help", True),
        (["--help", "parallel"], "help_topic", "parallel"),
        (["--help=parallel"], "help_topic", "parallel"),
        (["--help", "--json"], "help_topic", None),
    ],
)
def test_flags_stand_anywhere(words: list[str], field: str, value: object) -> None:
    for line in (words, ["plan", *words], ["plan", "a=1", *words]):
        made = parse(line)
        assert getattr(made, field) == value
        assert made.problems == []


@pytest.mark.parametrize(
    ("words", "key", "told"),
    [
        (["--jsn"], "--jsn", "`--json`"),
        (["--cfg", "hydra"], "--cfg", "--cfg job"),
        (["--cfg"], "--cfg", "--cfg job"),
        (["--config-dir"], "--config-dir", "--config-dir FOLDER"),
        (["-x"], "-x", "The flags are"),
    ],
)
def test_a_wrong_flag_is_a_problem_with_its_remedy(words: list[str], key: str, told: str) -> None:
    problems = parse(words).problems
    assert [problem.key for problem in problems] == [key]
    assert told in problems[0].fix


def test_a_command_can_be_said_again_for_the_same_configuration() -> None:
    made = Invocation(overrides=["+experiment=x", "run.name='a b'"], config_directory="my conf")
    assert made.words("plan") == (
        "python -m orchestrator plan +experiment=x 'run.name='\"'\"'a b'\"'\"'' --config-dir 'my conf'"
    )
    assert made.words("plan", ["a=1"]) == "python -m orchestrator plan a=1 --config-dir 'my conf'"
