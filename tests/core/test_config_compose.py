"""What a right configuration comes to: groups, keys, experiments, and which of them wins."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchestrator
from orchestrator.config.compose import load_config
from orchestrator.config.resolvers import machine_memory_bytes, memory_share_gib
from orchestrator.config.schema import RunConfig
from orchestrator.errors import ConfigError


def test_nothing_at_all_is_the_quick_start() -> None:
    assert load_config() == load_config(["+experiment=quickstart"])
    assert load_config().run.experiment == "quickstart"


def test_the_package_offers_load_config() -> None:
    assert orchestrator.load_config is load_config


@pytest.mark.parametrize("word", ["experiment=llama7b_ddp", "+experiment=llama7b_ddp", "++experiment=llama7b_ddp"])
def test_an_experiment_is_chosen_with_or_without_a_plus(word: str) -> None:
    assert load_config([word]).run.experiment == "llama7b_ddp"


@pytest.mark.parametrize("word", ["training.seed=7", "+training.seed=7", "++training.seed=7"])
def test_a_key_is_set_with_or_without_a_plus(word: str) -> None:
    assert load_config([word]).training.seed == 7


@pytest.mark.parametrize("words", [["gpu=h200"], ["cluster.gpu=h200"], ["+cluster.gpu=h200"]])
def test_a_gpu_is_chosen_as_a_group_or_by_its_key(words: list[str]) -> None:
    assert load_config(["cluster=a100_80gb_1x8", *words]).cluster.gpu.memory_gib == 139.8


def test_a_cluster_brings_its_gpu() -> None:
    assert load_config(["cluster=a100_80gb_1x8"]).cluster.gpu.name == "A100-80GB"


def test_a_group_on_the_command_line_wins_over_the_experiment_s_choice() -> None:
    config = load_config(["+experiment=llama7b_zero2", "parallel=zero3", "cluster=h100_80gb_2x8", "model=llama3_8b"])
    assert (config.parallel.zero_stage, config.cluster.nodes, config.model.vocab_size) == (3, 2, 128256)


def test_a_key_on_the_command_line_wins_over_every_file() -> None:
    config = load_config(["parallel.zero_stage=1", "+experiment=llama7b_zero2", "cluster.gpu.price_per_hour=2"])
    assert (config.parallel.zero_stage, config.cluster.gpu.price_per_hour) == (1, 2.0)


def test_a_key_and_its_group_s_option_go_together_in_any_order() -> None:
    left = load_config(["cluster.gpu.memory_gib=70", "gpu=a100_40gb", "cluster=a100_80gb_1x8"])
    assert left == load_config(["gpu=a100_40gb", "cluster=a100_80gb_1x8", "cluster.gpu.memory_gib=70"])
    assert left.cluster.gpu.memory_gib == 70


def test_node_groups_name_their_gpus() -> None:
    groups = load_config(
        ["cluster.node_groups=[{nodes: 1, gpus_per_node: 8, gpu: h200}, {nodes: 2, gpus_per_node: 4, gpu: a100_40gb}]"]
    ).cluster.node_groups
    assert [(group.nodes, group.gpu.name) for group in groups] == [(1, "H200-141GB"), (2, "A100-40GB")]


def test_an_entry_of_a_list_can_be_set_alone() -> None:
    config = load_config(
        ["cluster.node_groups=[{nodes: 1, gpus_per_node: 8, gpu: h200}]", "cluster.node_groups.0.nodes=3"]
    )
    assert config.cluster.node_groups[0].nodes == 3


@pytest.mark.parametrize(
    ("words", "steps", "tokens"),
    [
        (["training.steps=10"], 10, None),
        (["training.tokens=1e9"], None, 10**9),
        (["+experiment=llama7b_3d", "training.steps=10"], 10, None),
        (["+experiment=llama7b_3d", "training.tokens=5e11"], None, 5 * 10**11),
        (["training.steps=10", "training.tokens=1000"], 10, 1000),
        (["training.steps=null"], None, None),
    ],
)
def test_a_length_on_the_command_line_replaces_the_other_kind_of_a_file(
    words: list[str], steps: int | None, tokens: int | None
) -> None:
    training = load_config(words).training
    assert (training.steps, training.tokens) == (steps, tokens)


@pytest.mark.parametrize(
    ("word", "name"),
    [("run.name=007", "007"), ("run.name=1e3", "1e3"), ("run.name=true", "true"), ("run.name='a,b'", "a,b")],
)
def test_text_stays_as_it_was_typed(word: str, name: str) -> None:
    assert load_config([word]).run.name == name


def test_tags_are_free_names() -> None:
    assert load_config(["tracking.tags.team=a", "tracking.tags.seed=3"]).tracking.tags == {"team": "a", "seed": "3"}


def test_a_deleted_key_falls_back_to_the_schema() -> None:
    assert load_config(["+experiment=llama3_405b", "~model.rope_scaling"]).model.rope_scaling is None


def test_values_can_refer_to_each_other_and_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUS", "/data/corpus")
    config = load_config(["data.path=${oc.env:CORPUS}", "training.seed=${training.steps}"])
    assert (config.data.path, config.training.seed) == ("/data/corpus", config.training.steps)


def test_a_configuration_survives_its_own_plain_form() -> None:
    config = load_config(["+experiment=llama3_405b"])
    assert RunConfig.model_validate(config.to_dict()) == config


def test_the_local_cluster_shares_this_machine_s_memory() -> None:
    two, four = (load_config([f"cluster.gpus_per_node={number}"]).cluster for number in (2, 4))
    assert two.host_memory_gib == pytest.approx(machine_memory_bytes() / 2**30, abs=0.11)
    assert two.gpu.memory_gib == pytest.approx(2 * four.gpu.memory_gib, abs=0.21)


def test_a_container_s_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1073741824\n")
    assert machine_memory_bytes(limit) == 2**30
    limit.write_text("max\n")
    assert machine_memory_bytes(limit) == machine_memory_bytes(tmp_path / "absent") > 2**30


@pytest.mark.parametrize("shares", [0, -1, "two", True, None])
def test_memory_is_not_shared_by_nobody(shares: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        memory_share_gib(shares)


def test_a_small_share_of_memory_is_not_nothing() -> None:
    assert 0 < memory_share_gib(1000) < machine_memory_bytes() / 2**30 / 999


@pytest.mark.parametrize("value", ["~/texts", "Größe!", "a b;c", "50%~x", "run#2"])
def test_a_text_that_has_none_of_the_grammar_s_signs_means_itself(value: str) -> None:
    assert load_config([f"data.path={value}"]).data.path == value


def test_what_a_shipped_option_takes_from_a_key_that_the_own_one_leaves_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"taken from cluster\.gpus_per_node, which nothing sets\. Set cluster\.gpus"):
        load_config(["cluster=mine"], config_directory=tmp_path)


def test_processes_of_the_local_cluster_are_named_when_they_cannot_share_memory() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.gpu\.memory_gib.*at least 1"):
        load_config(["cluster.gpus_per_node=0"])


def test_composing_leaves_hydra_as_it_was() -> None:
    from hydra.core.global_hydra import GlobalHydra

    load_config()
    assert not GlobalHydra.instance().is_initialized()
