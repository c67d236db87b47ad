"""What a live cluster says of itself, asked for real: nodes with GPUs of Ray's bookkeeping only, one of them unlike."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from orchestrator.cli import main as cli
from orchestrator.errors import RunError
from orchestrator.launch.hardware import check_hardware
from orchestrator.launch.session import ray_session
from orchestrator.plan.run_plan import RunPlan
from tests.launch.other_node import can_be_elsewhere, elsewhere
from tests.launch.plans import cuda_plan

pytestmark = pytest.mark.ray

LABELS = {"ray.io/accelerator-type": "A100-80G", "acme.com/rack": "r1"}


def is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def installed(folder: Path, name: str, version: str) -> None:
    """What pip leaves of a distribution, for an environment that has `folder` on its path."""
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on a node's path, makes it one with an older torch and other code of this package."""
    folder = tmp_path_factory.mktemp("unlike")
    installed(folder, "torch", "2.12.0")
    (folder / "other" / "orchestrator").mkdir(parents=True)
    (folder / "other" / "orchestrator" / "__init__.py").write_text("")
    (folder / "sitecustomize.py").write_text(f"""
import importlib.machinery, sys
class Other:
    def find_spec(self, name, path=None, target=None):
        if name == "orchestrator":
            return importlib.machinery.PathFinder.find_spec(name, [{str(folder / "other")!r}])
sys.meta_path.insert(0, Other())
""")
    return folder


@pytest.fixture(scope="module")
def address(unlike: Path) -> Iterator[str]:
    """A head without GPUs, a node with 8, and one with 8 in another rack whose environment is another."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    quiet = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={**small, **quiet, "num_gpus": 0})
    cluster.add_node(**small, num_gpus=8, labels=LABELS)
    cluster.add_node(
        **small, num_gpus=8, labels={**LABELS, "acme.com/rack": "r2"}, env_vars={"PYTHONPATH": str(unlike)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster.address
    cluster.shutdown()


def test_the_inventory_is_a_table_and_a_file_that_plans(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = ["--config-dir", str(tmp_path / "mine")]
    assert cli.main(["inventory", "ours", "--write", *mine]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()[1:4]]
    assert [(words[1], words[2], words[3], words[-1]) for words in lines[:2]] in (
        [("8", "A100-80G", "a100_80gb", rack) for rack in racks] for racks in (("r1", "r2"), ("r2", "r1"))
    )
    assert "no GPU: not used for training" in out
    written = yaml.safe_load((tmp_path / "mine" / "cluster" / "ours.yaml").read_text(encoding="utf-8"))
    assert (written["nodes"], written["gpus_per_node"], written["gpu"]) == (2, 8, "a100_80gb")
    assert (written["cores_per_node"], written["domain_label"]) == (2, "acme.com/rack")
    assert written["host_memory_gib"] > 0
    assert cli.main(["plan", "+experiment=llama7b_zero2", "cluster=ours", *mine, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parallel"]["world_size"] == 16


def test_the_live_cluster_can_be_planned_for_and_searched_for(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "+experiment=llama7b_zero2", "cluster=ray", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["cluster"]["name"] == f"the Ray cluster at {address}"
    assert (plan["feasible"], plan["parallel"]["world_size"]) == (True, 16)
    assert cli.main(["search", "+experiment=llama7b_zero2", "cluster=ray", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]


def test_a_training_on_nodes_that_are_unlike_is_refused_by_what_differs(address: str) -> None:
    problems = [problem.message for problem in check_hardware(plan_for(16))]
    assert [said for said in problems if "torch is 2.12.0 on node" in said]
    assert [said for said in problems if "would run other code of this package" in said]
    assert len(problems) == 2


@pytest.mark.skipif(not can_be_elsewhere(), reason="a process may not have mounts of its own here")
def test_a_command_is_refused_with_all_that_is_wrong_on_a_node_without_package_shared_folders_and_like_versions(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node is a raylet that has another environment and finds nothing in our source and on the shared storage."""
    shared, environment = tmp_path / "shared", tmp_path / "environment"
    shared.mkdir()
    (shared / "text.txt").write_text("To be, or not to be. " * 50_000, encoding="utf-8")
    installed(environment, "ray", "2.59.0")
    installed(environment, "torch", "2.12.0")
    ours = [
        place
        for entry in sys.path
        for name in ("orchestrator", "models")
        if is_package(place := Path(entry, name).absolute())
    ]
    words = [
        "+experiment=llama7b_zero2", "cluster.require_labels={pool:far}", f"run.directory={shared}/runs", "data=text",
        f"data.path={shared}/text.txt", "data.tokenizer=bytes", f"checkpoint.directory={shared}",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    ]  # fmt: skip
    far = {**LABELS, "pool": "far"}
    with elsewhere(
        address, [shared, *dict.fromkeys(ours)], {"PYTHONPATH": str(environment)}, num_cpus=2, num_gpus=8, labels=far
    ):
        code = cli.main(words)
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    torch = version("torch").partition("+")[0]
    there, same = f"node {socket.gethostname()}", "mounts at the same path (infra/README.md says how)"
    assert " ".join(said.err.split()) == " ".join(
        [
            "6 problems; nothing was started.",
            f"1. cluster: this package is missing on {there}: there is no package `orchestrator`.",
            "-> Install it there, or send it along with the run: python -m orchestrator submit",
            f"2. cluster: versions differ: ray is 2.59.0 on {there} and {version('ray')} here.",
            "-> Use one environment on all of them: the same image, or `pip install -c infra/constraints.txt`.",
            f"3. cluster: versions differ: torch is 2.12.0 on {there} and {torch} here.",
            "-> Use one environment on all of them: the same image, or `pip install -c infra/constraints.txt`.",
            f"4. run.directory: what is written to {shared} here is not seen on {there}: they do not share it.",
            f"-> Give run.directory a folder that every node {same}.",
            f"5. checkpoint.directory: what is written to {shared} here is not seen on {there}: they do not share it.",
            f"-> Give checkpoint.directory a folder that every node {same}.",
            f"6. data.path: {shared}/text.txt does not exist on {there}.",
            "-> Put it on storage that every node mounts at the same path, or copy it there.",
        ]
    )
    assert [file.name for file in shared.iterdir()] == ["text.txt"], "nothing is begun, and nothing left"


def test_what_the_cluster_can_never_hold_is_refused_before_nodes_are_asked(address: str) -> None:
    (problem,) = check_hardware(plan_for(24))
    assert "needs 24 GPUs; 2 nodes hold 8 + 8" in problem.message


def plan_for(gpus: int) -> RunPlan:
    return cuda_plan(nodes=gpus // 8, gpus=8)


def test_a_machine_that_is_no_node_is_told_so_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setattr(services, "find_node_ids", list)
    with pytest.raises(RunError, match="is no node of the Ray cluster") as caught, ray_session(None):
        pass
    assert "submit" in caught.value.problems[0].fix


def test_a_cluster_of_another_version_is_named_with_both(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import utils

    monkeypatch.setattr(utils, "compute_version_info", lambda: ("2.59.0", "3.12.1"))
    with pytest.raises(RunError, match=r"it runs Ray 2\.60") as caught, ray_session(None):
        pass
    assert "this command Ray 2.59.0 and Python 3.12.1" in caught.value.problems[0].message
    assert "constraints.txt" in caught.value.problems[0].fix
