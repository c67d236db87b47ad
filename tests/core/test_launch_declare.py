"""A live cluster as a configuration: GPUs recognised, like nodes together, a file that composes as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.config.compose import examine, load_config
from orchestrator.errors import ConfigError, Problem
from orchestrator.launch.declare import LiveNode, declare, document
from orchestrator.launch.gpu_kinds import Match, by_label, by_product, known_entries
from orchestrator.plan.inventory import take_inventory

ENTRIES = known_entries()


@pytest.mark.parametrize(
    ("product", "total_gib", "option"),
    [
        ("NVIDIA A100-SXM4-80GB", 80.0, "a100_80gb"),
        ("NVIDIA A100-SXM4-40GB", 40.0, "a100_40gb"),
        ("NVIDIA A100 80GB PCIe", 80.0, "a100_80gb_pcie"),
        ("NVIDIA A100-PCIE-40GB", 40.0, "a100_40gb_pcie"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100_80gb"),
        ("NVIDIA H100 PCIe", 79.6, "h100_80gb_pcie"),
        ("NVIDIA H200", 140.4, "h200"),
        ("NVIDIA B200", 179.1, "b200"),
        ("NVIDIA L40S", 45.0, "l40s"),
        ("NVIDIA A10", 22.5, "a10"),
        ("Tesla V100-SXM2-32GB", 32.0, "v100_32gb"),
        ("NVIDIA GeForce RTX 4090", 24.0, "rtx4090"),
        ("NVIDIA A10G", 22.5, None),
        ("NVIDIA H100 NVL", 93.6, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 19.8, None),
        ("NVIDIA T4", 15.0, None),
    ],
)
def test_a_driver_s_name_and_memory_leave_one_entry_or_none(product: str, total_gib: float, option: str | None) -> None:
    assert by_product(product, total_gib, ENTRIES) == Match(option)


@pytest.mark.parametrize(
    ("label", "option", "others"),
    [
        ("A100", "a100_80gb", {"a100_40gb", "a100_40gb_pcie", "a100_80gb_pcie"}),
        ("A100-80G", "a100_80gb", set()),
        ("A100-40G", "a100_40gb", set()),
        ("H200", "h200", set()),
        ("B200", "b200", set()),
        ("GB200", "gb200", set()),
        ("L40S", "l40s", set()),
        ("AMD-Instinct-MI300X-OAM", "mi300x", set()),
        ("GeForce-RTX-4090", "rtx4090", set()),
        ("a100_80gb_pcie", "a100_80gb_pcie", set()),
        ("A10G", None, set()),
        ("TPU-V4", None, set()),
    ],
)
def test_ray_s_label_is_matched_and_what_else_it_may_mean_is_kept(
    label: str, option: str | None, others: set[str]
) -> None:
    match = by_label(label, ENTRIES)
    assert match.option == option
    assert set(match.others) == others


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.option)
def test_every_shipped_entry_is_found_by_its_own_name(entry) -> None:
    assert by_label(entry.name, ENTRIES).option == entry.option


def node(number: int, gpus: int = 8, kind: str = "H200", memory: float | None = 2014.0, cpus: int = 128, **more):
    return LiveNode(f"id{number}", f"host{number}", gpus, cpus, kind, memory_gib=memory, **more)


def composed(tmp_path: Path, text: str, *words: str):
    (tmp_path / "cluster").mkdir(exist_ok=True)
    (tmp_path / "cluster" / "ours.yaml").write_text(text, encoding="utf-8")
    return load_config(["cluster=ours", *words], config_directory=str(tmp_path))


def test_like_nodes_are_one_plain_cluster_and_the_least_memory_counts(tmp_path: Path) -> None:
    declared = declare([node(1, memory=2014.2), node(2, memory=2013.7), node(3, gpus=0, kind="")], ENTRIES)
    text = document(declared, "ours", "10.0.0.1:6379", "2026-01-02")
    assert yaml.safe_load(text) == {
        "name": "ours", "device": "cuda", "nodes": 2, "gpus_per_node": 8, "gpu": "h200", "host_memory_gib": 2013,
        "cores_per_node": 128,
    }  # fmt: skip
    assert "16 GPUs of the Ray cluster at 10.0.0.1:6379 on 2026-01-02." in text.splitlines()[0]
    cluster = composed(tmp_path, text).cluster
    assert (cluster.gpu.name, cluster.nodes) == ("H200-141GB", 2)


def test_unlike_nodes_are_groups_and_the_file_composes(tmp_path: Path) -> None:
    nodes = [node(1), node(2), node(3, gpus=4), node(4, kind="A100-80G"), node(5, memory=1007.0)]
    declared = declare(nodes, ENTRIES)
    config = composed(tmp_path, document(declared, "ours", "head:6379", "2026-01-02"))
    groups = [(g.nodes, g.gpus_per_node, g.gpu.name, g.host_memory_gib) for g in config.cluster.node_groups]
    assert sorted(groups) == [
        (1, 4, "H200-141GB", 2014),
        (1, 8, "A100-80GB", 2014),
        (1, 8, "H200-141GB", 1007),
        (2, 8, "H200-141GB", 2014),
    ]
    assert take_inventory(config.cluster).gpus == 36


def test_a_label_that_fits_several_entries_is_taken_with_a_note_and_can_be_settled() -> None:
    declared = declare([node(1, kind="A100"), node(2, kind="A100")], ENTRIES)
    (note,) = declared.notes
    assert "a100_80gb is taken" in note
    assert "gpu=NAME" in note
    settled = declare([node(1, kind="A100")], ENTRIES, gpu="a100_40gb")
    assert (settled.groups[0].gpu, settled.notes) == ("a100_40gb", ())


def test_the_driver_knows_better_than_the_label() -> None:
    told = node(1, kind="A100", products=(("NVIDIA A100-SXM4-40GB", 40.0),) * 8)
    assert declare([told], ENTRIES).groups[0].gpu == "a100_40gb"


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (node(1, kind="A10G"), "host1: A10G is no GPU of conf/gpu/"),
        (node(1, kind="A10G", products=(("NVIDIA A10G", 22.49),)), "NVIDIA A10G (22.5 GiB) is no GPU of conf/gpu/"),
        (node(1, kind=""), "neither the driver nor Ray's label"),
    ],
)
def test_an_unknown_kind_is_named_with_what_to_add(live: LiveNode, said: str) -> None:
    (problem,) = declare([node(7), live], ENTRIES).problems
    assert said in problem.message
    assert "gpu=NAME" in problem.fix
    if live.kind:
        assert "gpu/a10g.yaml" in problem.fix
        assert "# @package cluster.gpu" in problem.fix


def test_the_file_that_is_asked_for_is_one_that_composes_and_is_recognised(tmp_path: Path) -> None:
    live = node(1, kind="A10G", products=(("NVIDIA A10G", 22.49),))
    (problem,) = declare([live], ENTRIES).problems
    body = problem.fix.partition("--config-dir MY_CONF:\n")[2].replace("...", "70")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "a10g.yaml").write_text(body, encoding="utf-8")
    declared = declare([live], known_entries(tmp_path))
    assert declared.problems == ()
    cluster = composed(tmp_path, document(declared, "ours", "head:6379", "2026-01-02")).cluster
    assert cluster.gpu.memory_gib == pytest.approx(22.5)


def test_a_cluster_without_gpus_is_refused_with_what_to_do() -> None:
    (problem,) = declare([node(1, gpus=0, kind=""), node(2, gpus=0, kind="")], ENTRIES).problems
    assert "none of the 2 living nodes" in problem.message
    assert "cluster.device=cpu" in problem.fix


def test_the_cpus_of_a_cluster_can_be_what_computes(tmp_path: Path) -> None:
    declared = declare([node(1, gpus=0, cpus=4, memory=16.3)], ENTRIES, "cpu")
    config = composed(tmp_path, document(declared, "ours", "head:6379", "2026-01-02"))
    assert (config.cluster.device, config.cluster.gpus_per_node, config.cluster.gpu.memory_gib) == ("cpu", 4, 4.0)


def test_a_label_for_racks_is_written_down_and_ray_s_own_is_not_needed() -> None:
    racks = {"acme.com/rack": "r1", "ray.io/node-id": "x"}
    assert declare([node(1, labels=racks)], ENTRIES).domain_label == "acme.com/rack"
    assert declare([node(1, labels={"ray.io/gpu-domain": "d", **racks})], ENTRIES).domain_label is None


# -- cluster=ray ------------------------------------------------------------------------------------------------------


def live(device: str, gpu: str | None) -> dict:
    declared = declare([node(1), node(2)], ENTRIES, "cpu" if device == "cpu" else "cuda", gpu)
    return declared.body("the live one")


def test_cluster_ray_is_what_the_live_cluster_says() -> None:
    cluster = load_config(["cluster=ray", "+experiment=llama7b_zero2"], ask_cluster=live).cluster
    assert (cluster.name, cluster.nodes, cluster.gpu.name) == ("the live one", 2, "H200-141GB")
    assert cluster.network_gbps_per_gpu is None


def test_keys_on_the_command_line_win_over_the_live_cluster() -> None:
    cluster = load_config(
        ["cluster=ray", "cluster.nodes=1", "cluster.network_gbps_per_gpu=400"], ask_cluster=live
    ).cluster
    assert (cluster.nodes, cluster.network_gbps_per_gpu, cluster.gpus_per_node) == (1, 400, 8)


def test_the_device_that_is_typed_is_asked_for() -> None:
    assert load_config(["cluster=ray", "cluster.device=cpu"], ask_cluster=live).cluster.gpus_per_node == 128


def test_an_experiment_of_the_users_may_choose_the_live_cluster(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /cluster: ray\n  - _self_\n"
        "cluster:\n  gpus_per_node: 4\n"
    )
    cluster = load_config(["+experiment=mine"], config_directory=str(tmp_path), ask_cluster=live).cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)


def test_without_anyone_to_ask_it_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="nobody asks one here"):
        load_config(["cluster=ray"])


def test_why_a_cluster_could_not_be_asked_comes_with_the_other_problems() -> None:
    def silent(device: str, gpu: str | None) -> dict:
        raise ConfigError(Problem("", "it is silent.", "Wake it."))

    examined = examine(["cluster=ray", "training.steps=-1"], ask_cluster=silent)
    assert examined.problems[0].message == "it is silent."
    assert {problem.key for problem in examined.problems} == {"cluster", "training.steps"}
    assert examined.remainder() is None, "nothing is planned for a cluster that is not known"
