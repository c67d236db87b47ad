"""The files of infra/ held against Ray itself, without a cluster: its schema, its command line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

INFRA = Path(__file__).parents[2] / "infra"
CLUSTER: dict[str, Any] = yaml.safe_load((INFRA / "ray-cluster.yaml").read_text(encoding="utf-8"))


def ray_commands() -> list[tuple[str, str]]:
    """(file, words after `ray`) of every call of Ray's command line in the files; variables stand for values."""
    keys = ("head_start_ray_commands", "worker_start_ray_commands")
    found = [("ray-cluster.yaml", command) for key in keys for command in CLUSTER[key]]
    text = (INFRA / "slurm.sh").read_text(encoding="utf-8").replace("\\\n", " ").replace("2>/dev/null", "")
    script = "\n".join(line.partition(" #")[0] for line in text.splitlines() if not line.startswith("#"))
    found += [("slurm.sh", command) for command in re.findall(r"(?<![\w/=-])ray [a-z-]+(?: [^&|;>)]*)?", script)]
    page = (INFRA / "README.md").read_text(encoding="utf-8") + (INFRA / "ray-cluster.yaml").read_text(encoding="utf-8")
    found += [("pages", command) for command in re.findall(r"`(ray (?:up|down|job|start)[^`]*)`", page)]
    return [(file, re.sub(r'"?\$\(?\w+\)?"?', "1", command).removeprefix("ray ").strip()) for file, command in found]


def test_the_cluster_file_fits_ray_s_own_schema() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(CLUSTER, schema)


def test_ray_s_launcher_fills_the_cluster_file_in() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    filled = prepare_config(dict(CLUSTER))
    validate_config(filled)
    assert filled["available_node_types"]
    assert filled["max_workers"] == len(CLUSTER["provider"]["worker_ips"])


def test_the_head_speaks_with_the_launcher_and_workers_with_the_head() -> None:
    (head,) = [line for line in CLUSTER["head_start_ray_commands"] if "start" in line]
    (worker,) = [line for line in CLUSTER["worker_start_ray_commands"] if "start" in line]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    port = re.search(r"--port=(\d+)", head)
    assert port is not None
    assert f"--address=$RAY_HEAD_IP:{port[1]}" in worker


@pytest.mark.parametrize(("file", "command"), ray_commands())
def test_every_call_of_ray_is_one_that_it_understands(file: str, command: str) -> None:
    from ray.scripts.scripts import cli

    name, *words = shlex.split(command)
    target = cli.commands[name]
    while hasattr(target, "commands") and words:
        target = target.commands[words.pop(0)]
    target.make_context(name, words, resilient_parsing=False)


def test_calls_of_ray_are_found_in_each_file() -> None:
    assert {file for file, _ in ray_commands()} >= {"ray-cluster.yaml", "slurm.sh"}
