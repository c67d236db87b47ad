"""Every shipped file is a test case: it composes, validates and plans; the sizes are the published ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from models.spec import parameter_count
from orchestrator.config import files, keys, locate, reference
from orchestrator.config.compose import LIVE_CLUSTER, load_config
from orchestrator.config.schema import ClusterConfig, GpuConfig, ModelConfig, RunConfig
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan

GOLDEN_KEYS = Path(__file__).parent / "golden" / "config_keys.txt"
EXPERIMENTS = locate.options("experiment")
OPTIONS = [(group, option) for group in locate.GROUPS for option in locate.options(group)]


@cache
def planned(experiment: str) -> RunPlan:
    return make_plan(load_config([f"+experiment={experiment}"]))


def test_the_experiments_of_the_contract_exist() -> None:
    assert {
        "quickstart", "llama7b_offload", "llama7b_ddp", "llama7b_zero1", "llama7b_zero2", "llama7b_zero3", "llama7b_3d",
        "llama13b_zero2", "llama70b_3d", "llama3_8b", "llama3_405b", "gpt3_175b",
    } <= set(EXPERIMENTS)  # fmt: skip


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_is_feasible(experiment: str) -> None:
    assert planned(experiment).problems == ()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_s_body_sets_nothing_that_a_group_could_be_chosen_for(experiment: str) -> None:
    file = locate.option_file("experiment", experiment, None)
    assert file is not None
    assert files.read_body(file) == {}


@pytest.mark.parametrize(
    ("experiment", "world", "degrees"),
    [
        ("quickstart", 2, (2, 1, 1)),
        ("llama7b_offload", 1, (1, 1, 1)),
        ("llama7b_ddp", 8, (8, 1, 1)),
        ("llama7b_zero2", 8, (8, 1, 1)),
        ("llama7b_3d", 64, (8, 8, 1)),
        ("llama70b_3d", 128, (4, 8, 4)),
        ("llama3_405b", 16384, (128, 8, 16)),
        ("gpt3_175b", 1024, (8, 8, 16)),
    ],
)
def test_the_experiments_are_split_as_their_descriptions_say(
    experiment: str, world: int, degrees: tuple[int, int, int]
) -> None:
    parallel = planned(experiment).parallel
    assert parallel is not None
    assert parallel.world_size == world
    assert (parallel.data, parallel.tensor, parallel.pipeline) == degrees


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS])
def test_every_option_fits_the_schema_and_says_what_it_is(group: str, option: str) -> None:
    """Each on its own: what all options set together is covered by the experiments."""
    file = locate.option_file(group, option, None)
    assert file is not None
    assert locate.comment_of(file).endswith(".")
    body = files.read_body(file)
    assert isinstance(body, dict), body
    unknown = [key for key, _ in files.flatten(body, locate.PACKAGES[group]) if keys.find(key) is None]
    assert not unknown


@pytest.mark.parametrize("cluster", [name for name in locate.options("cluster") if name != LIVE_CLUSTER])
def test_every_cluster_names_a_gpu_that_exists(cluster: str) -> None:
    """What Hydra makes of such a file is tested where it composes; here each file is read on its own."""
    file = locate.option_file("cluster", cluster, None)
    assert file is not None
    (choice,) = [entry for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["defaults"] if entry != "_self_"]
    gpu = locate.option_file("gpu", choice["override /gpu@_global_.gpu"], None)
    assert gpu is not None
    if cluster != "local":
        ClusterConfig.model_validate({**files.read_body(file), "gpu": files.read_body(gpu)})


PUBLISHED = {
    "llama_7b": 6_738_415_616, "llama_13b": 13_015_864_320, "llama_33b": 32_528_943_616, "llama_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616, "llama2_13b": 13_015_864_320, "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496, "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400, "tinyllama_1_1b": 1_100_048_384, "mistral_7b": 7_241_732_096,
    "smollm2_135m": 134_515_008, "qwen2_0_5b": 494_032_768, "gpt2": 124_439_808, "gpt2_large": 774_030_080,
    "gpt3_175b": 174_604_259_328,
}  # fmt: skip
"""Parameters of the released checkpoints; of GPT-3 the closed form of arXiv:2005.14165, table 2.1."""


def test_every_published_model_is_compared_with_its_parameter_count() -> None:
    assert set(PUBLISHED) == set(locate.options("model")) - {"llama_tiny"}


@pytest.mark.parametrize(("model", "parameters"), PUBLISHED.items(), ids=PUBLISHED)
def test_a_model_has_the_parameters_of_the_published_one(model: str, parameters: int) -> None:
    file = locate.option_file("model", model, None)
    assert file is not None
    assert parameter_count(ModelConfig.model_validate(files.read_body(file))) == parameters
    assert f"{parameters:,}" in locate.comment_of(file)


@pytest.mark.parametrize("gpu", [gpu for gpu in locate.options("gpu") if gpu != "cpu"])
def test_a_gpu_has_its_figures_a_source_and_no_price(gpu: str) -> None:
    file = locate.option_file("gpu", gpu, None)
    assert file is not None
    entry = GpuConfig.model_validate(files.read_body(file))
    assert entry.source
    assert entry.memory_bandwidth_gb_per_s
    assert entry.peak_tflops.fp16
    assert entry.price_per_hour is None


def test_the_headline_gpu_has_the_memory_that_it_shows() -> None:
    memory = planned("llama7b_zero2").memory
    assert memory is not None
    assert memory.capacity_bytes == int(79.2 * 2**30)


def test_the_keys_are_those_of_the_golden_list() -> None:
    """A new key is a visible change: `python -m orchestrator --help keys > tests/core/golden/config_keys.txt`."""
    assert GOLDEN_KEYS.read_text(encoding="utf-8").splitlines() == list(keys.leaf_names())


@pytest.mark.parametrize("name", keys.all_keys())
def test_every_key_has_a_docstring(name: str) -> None:
    doc = keys.all_keys()[name].doc
    assert doc
    assert doc.endswith((".", ")."))


@pytest.mark.parametrize("group", locate.GROUPS)
def test_help_of_a_group_names_every_option_and_every_key(group: str) -> None:
    text = reference.explain(group)
    package = locate.PACKAGES[group]
    below = [name for name in keys.leaf_names() if package and name.startswith(f"{package}.")]
    assert not [word for word in (*locate.options(group), *below) if word not in text]


@pytest.mark.parametrize("name", keys.leaf_names())
def test_help_of_a_key_says_what_it_takes_its_default_and_its_meaning(name: str) -> None:
    key, text = keys.all_keys()[name], " ".join(reference.explain(name).split())
    assert text.startswith(name)
    assert f"takes {key.takes}" in text
    assert key.doc in text
    assert "default" in text


def test_the_configuration_s_yaml_is_read_back_as_it_was() -> None:
    config = load_config(["+experiment=llama3_405b"])
    assert RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
