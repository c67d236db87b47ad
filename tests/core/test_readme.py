"""What the README states is held: its commands are complete, its paths exist, its examples are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from orchestrator.cli.commands import offered
from orchestrator.config.compose import load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def command(name: str) -> str:
    """The block after the marker of that name, as `.ci/run` reads it."""
    found = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1).strip()


@pytest.mark.parametrize(("name", "ends"), [("quickstart", "-m orchestrator"), ("tests", "-m pytest")])
def test_each_command_makes_its_own_environment_and_installs(name: str, ends: str) -> None:
    text = command(name)
    assert text.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert text.endswith(ends)
    assert "-c infra/constraints.txt" in text


def paths() -> list[str]:
    """Every path that a table row or a sentence names in code marks."""
    named = re.findall(r"`((?:orchestrator|models|conf|tests|infra|\.ci)(?:/[\w./]*)?)`", README)
    inside = re.findall(r"`((?:cli|config|plan|launch|engine)/\w+\.py)(?::\w+)?`", README)
    return sorted({*named, *(f"orchestrator/{path}" for path in inside)})


@pytest.mark.parametrize("path", paths())
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_path_of_a_run_names_functions_that_exist() -> None:
    for path, function in re.findall(r"`((?:cli|config|plan|launch|engine)/\w+\.py):(\w+)`", README):
        assert f"def {function}(" in (ROOT / "orchestrator" / path).read_text()


def examples() -> list[list[str]]:
    lines = re.findall(r"python -m orchestrator((?: [\w+./=]+)+)", README)
    words = [shlex.split(line) for line in lines]
    # `cluster=ray` asks a live cluster; what else such an example says must compose without.
    settings = [[word for word in line if "=" in word and word != "cluster=ray"] for line in words]
    return [line for line in settings if line]


@pytest.mark.parametrize("overrides", examples(), ids=" ".join)
def test_every_example_composes(overrides: list[str]) -> None:
    assert load_config(overrides).model.hidden_size > 0


def test_every_command_is_described_and_none_that_is_missing() -> None:
    described = set(re.findall(r"`python -m orchestrator (\w+)\b", README))
    assert described | {"train"} == set(offered())


def test_constraints_hold_no_addresses() -> None:
    lines = (ROOT / "infra" / "constraints.txt").read_text().splitlines()
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[\w.\-]+==[\w.]+", line)] == []
