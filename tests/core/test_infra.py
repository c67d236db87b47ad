"""The files of infra/ as far as they can be held without their services: shell, manifest, image, our own commands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.invocation import parse
from orchestrator.config import job_paths
from orchestrator.config.compose import LIVE_CLUSTER, load_config

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
SLURM = (INFRA / "slurm.sh").read_text(encoding="utf-8")
DOCKERFILE = (INFRA / "Dockerfile").read_text(encoding="utf-8")
RAYJOB: dict[str, Any] = yaml.safe_load((INFRA / "rayjob.yaml").read_text(encoding="utf-8"))


def one_line(script: str) -> str:
    return script.replace("\\\n", " ")


def our_commands() -> list[tuple[str, list[str]]]:
    """(file, words) of every `python -m orchestrator` in the files; shell variables stand for paths."""
    found = [("rayjob.yaml", RAYJOB["spec"]["entrypoint"])]
    for name in ("slurm.sh", "Dockerfile"):
        for line in one_line((INFRA / name).read_text(encoding="utf-8")).splitlines():
            if "orchestrator" in line and '"-m"' in line:
                found.append((name, " ".join(yaml.safe_load(line.removeprefix("CMD")))))
            elif line.lstrip().startswith("python -m orchestrator"):
                found.append((name, line.replace("$SHARED", "/shared").replace('"$@"', "").rstrip("& ")))
    return [(name, shlex.split(line.partition("orchestrator")[2])) for name, line in found]


@pytest.mark.parametrize(("file", "words"), our_commands(), ids=[file for file, _ in our_commands()])
def test_every_command_of_ours_is_one_that_exists_and_composes(file: str, words: list[str]) -> None:
    made = parse(words)
    assert made.problems == []
    known = [word for word in made.overrides if word != f"cluster={LIVE_CLUSTER}"]
    config = load_config(known)
    if not made.help:
        assert job_paths.output_problems(config) == []
        assert job_paths.tracking_in_a_job(config, {}) is None


def test_the_commands_are_found() -> None:
    assert [file for file, _ in our_commands()] == ["rayjob.yaml", "slurm.sh", "Dockerfile"]


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", INFRA / "slurm.sh"], check=True)
    if linter := shutil.which("shellcheck"):
        subprocess.run([linter, INFRA / "slurm.sh"], check=True)


def test_slurm_asks_for_the_nodes_it_uses_and_warns_before_the_end() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", SLURM, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"  # one Ray node a machine
    kind, _, seconds = asked["signal"].partition("@")
    assert kind == "B:TERM"  # to the script alone, which tells the training
    assert int(seconds) > job_paths.stop_seconds(load_config())


def test_the_manifest_has_what_kuberay_requires() -> None:
    assert (RAYJOB["apiVersion"], RAYJOB["kind"]) == ("ray.io/v1", "RayJob")
    spec = RAYJOB["spec"]
    known = {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "runtimeEnvYAML", "rayClusterSpec"}
    assert set(spec) == known
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all({"rayStartParams", "template"} <= set(group) for group in groups)
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"]


def test_every_pod_mounts_the_volume_that_the_job_writes_to() -> None:
    run_directory = Path(dict(word.split("=", 1) for word in our_commands()[0][1] if "=" in word)["run.directory"])
    cluster = RAYJOB["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert any(run_directory.is_relative_to(path) for path in mounts)
        assert set(mounts.values()) <= volumes
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_a_stopped_job_of_the_manifest_has_time_to_save() -> None:
    variables = yaml.safe_load(RAYJOB["spec"]["runtimeEnvYAML"])["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())
    assert int(variables[job_paths.WAIT_VARIABLE]) >= job_paths.stop_seconds(load_config())


def test_all_files_speak_of_one_version_of_ray() -> None:
    constraints = (INFRA / "constraints.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^ray==(\S+)$", constraints, re.MULTILINE)
    assert RAYJOB["spec"]["rayClusterSpec"]["rayVersion"] == pinned


def test_the_image_is_made_of_files_that_exist_and_of_a_python_that_serves() -> None:
    lines = [line for line in one_line(DOCKERFILE).splitlines() if line and not line.startswith("#")]
    words = [shlex.split(line) for line in lines]
    for _, *sources, _ in (line for line in words if line[0] == "COPY"):
        for source in sources:
            assert (ROOT / source).exists(), source
    (base,) = (line[1] for line in words if line[0] == "FROM")
    assert base.startswith("python:3.11")
    assert {line[0] for line in words} <= {"FROM", "RUN", "WORKDIR", "COPY", "CMD"}
    installs = next(line for line in lines if "pip install" in line)
    assert "--constraint infra/constraints.txt" in installs
    for run in (line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")):
        subprocess.run(["bash", "-n", "-c", run], check=True)


def test_everything_that_the_package_needs_is_in_the_image() -> None:
    """What the wheel is made of: hatchling fails without it."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert {"pyproject.toml", "README.md", "LICENSE", "conf", "models", "orchestrator"} <= sources
    assert 'packages = ["orchestrator", "models"]' in project
    assert '"conf" = "orchestrator/conf"' in project


def test_the_page_names_every_file() -> None:
    page = (INFRA / "README.md").read_text(encoding="utf-8")
    assert {file.name for file in INFRA.iterdir()} - {"README.md"} == set(re.findall(r"^\| `([\w.-]+)` \|", page, re.M))
