"""Files of the user's own (--config-dir), files that are broken, and files that disagree with the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config import files, locate
from orchestrator.config.compose import load_config
from orchestrator.config.schema import RunConfig
from orchestrator.errors import ConfigError, Problem


class Folder:
    """A folder of configuration files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def load(self, *overrides: str) -> RunConfig:
        return load_config(overrides, config_directory=str(self.path))

    def problems(self, *overrides: str) -> tuple[Problem, ...]:
        with pytest.raises(ConfigError) as caught:
            self.load(*overrides)
        return caught.value.problems


@pytest.fixture
def mine(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "my conf, (new)")


def test_options_of_one_s_own_stand_beside_the_shipped_ones(mine: Folder) -> None:
    mine.write("model/small.yaml", "hidden_size: 64\nintermediate_size: 128\nnum_hidden_layers: 2\n"
               "num_attention_heads: 4\nvocab_size: 300\nmax_position_embeddings: 256\n")  # fmt: skip
    mine.write("experiment/mine.yaml", "# @package _global_\ndefaults:\n  - override /model: small\n"
               "  - override /cluster: a100_80gb_1x8\n  - override /gpu: h200\n  - _self_\n"
               "training:\n  steps: 7\n")  # fmt: skip
    config = mine.load("+experiment=mine")
    assert (config.model.hidden_size, config.training.steps, config.run.experiment) == (64, 7, "mine")
    assert config.cluster.gpu.name == "H200-141GB"


def test_a_cluster_of_one_s_own_names_its_gpu(mine: Folder) -> None:
    mine.write("cluster/lab.yaml", "nodes: 2\ngpus_per_node: 4\ngpu: a100_40gb\n")
    assert mine.load("cluster=lab").cluster.gpu.name == "A100-40GB"
    assert mine.load("cluster=lab", "gpu=h200").cluster.gpu.name == "H200-141GB"
    assert mine.load("cluster=lab", "cluster.gpu.price_per_hour=3").cluster.gpu.price_per_hour == 3


def test_a_gpu_of_one_s_own_can_be_named_anywhere(mine: Folder) -> None:
    mine.write("gpu/next.yaml", "# @package cluster.gpu\nname: NEXT\nmemory_gib: 300\n")
    assert mine.load("cluster=h200_1x8", "gpu=next").cluster.gpu.memory_gib == 300
    groups = mine.load("cluster.node_groups=[{nodes: 1, gpus_per_node: 1, gpu: next}]").cluster.node_groups
    assert groups[0].gpu.name == "NEXT"


BROKEN = [
    # (id, text, words in the message)
    ("a tab", "training:\n\tsteps: 1\n", "line 2, column 1 is not valid YAML"),
    ("an open bracket", "a: [1, 2\nb: 3\n", "is not valid YAML"),
    ("the same key twice", "hidden_size: 1\nhidden_size: 2\n", "duplicate key hidden_size"),
    ("a list", "- 1\n- 2\n", "does not hold a map"),
    ("a word", "hello\n", "does not hold a map"),
    ("an open interpolation", "hidden_size: ${model\n", "broken.yaml"),
]


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_broken_file_is_named(mine: Folder, text: str, message: str) -> None:
    file = mine.write("model/broken.yaml", text)
    problems = mine.problems("model=broken")
    told = " ".join(str(problem) for problem in problems)
    assert message in told
    assert str(file) in told


def test_a_file_that_is_no_text_is_named(mine: Folder) -> None:
    file = mine.write("model/broken.yaml", "")
    file.write_bytes(b"\xff\xfe\x00hello: \x80")
    assert str(file) in str(mine.problems("model=broken")[0])


WRONG_FILES = [
    # (id, file, text, overrides, key, words in message or fix)
    ("a mistyped key", "training/x.yaml", "sequence_length: 8\nglobal_batch_size: 2\nstpes: 3\n", ["training=x"],
     "training.stpes", "no key `training.stpes`", "`training.steps`"),
    ("a mistyped key in an experiment", "experiment/x.yaml", "# @package _global_\nmodel:\n  hiden_size: 3\n",
     ["+experiment=x"], "model.hiden_size", "no key", "`model.hidden_size`"),
    ("a wrong type", "training/x.yaml", "sequence_length: long\nglobal_batch_size: 2\nsteps: 3\n", ["training=x"],
     "training.sequence_length", "'long' was given in", "Tokens of one training sequence"),
    ("a missing key", "training/x.yaml", "sequence_length: 8\nsteps: 3\n", ["training=x"],
     "training.global_batch_size", "nothing sets it", "Write it into"),
    ("an octal that is none", "training/x.yaml", "sequence_length: '010'\nglobal_batch_size: 2\nsteps: 3\n",
     ["training=x"], "training.sequence_length", "'010' was given in", ""),
    ("a GPU without its place", "gpu/x.yaml", "name: X\nmemory_gib: 1\n", ["gpu=x"], "gpu", "would land under `gpu`",
     "`# @package cluster.gpu`"),
    ("an experiment without its place", "experiment/x.yaml", "training:\n  steps: 3\n", ["+experiment=x"], "experiment",
     "would land under `experiment`", "`# @package _global_`"),
    ("an interpolation to nothing", "training/x.yaml", "sequence_length: ${a.b}\nglobal_batch_size: 2\nsteps: 3\n",
     ["training=x"], "training.sequence_length", "a.b", "${section.key}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "overrides", "key", "message", "fix"),
    [row[1:] for row in WRONG_FILES],
    ids=[row[0] for row in WRONG_FILES],
)
def test_a_mistake_in_a_file_is_told_with_the_file(
    mine: Folder, name: str, text: str, overrides: list[str], key: str, message: str, fix: str
) -> None:
    file = mine.write(name, text)
    problems = mine.problems(*overrides)
    assert [problem.key for problem in problems] == [key]
    assert message in problems[0].message
    assert fix in problems[0].fix
    assert str(file) in str(problems[0])


def test_a_defaults_list_that_names_nothing_is_refused_with_its_file(mine: Folder) -> None:
    mine.write("experiment/x.yaml", "# @package _global_\ndefaults:\n  - override /model: nowhere\n")
    problems = mine.problems("+experiment=x")
    assert "nowhere" in str(problems[0])


FOLDERS = [
    ("a shipped name", "model/llama2_7b.yaml", "has the name of a shipped option"),
    ("an unknown group", "unheard/x.yaml", "`unheard` is not a configuration group"),
    ("no group", "x.yaml", "lies in no group"),
]


@pytest.mark.parametrize(("name", "message"), [row[1:] for row in FOLDERS], ids=[row[0] for row in FOLDERS])
def test_a_file_that_would_be_ignored_is_refused(mine: Folder, name: str, message: str) -> None:
    file = mine.write(name, "hidden_size: 1\n")
    problems = mine.problems()
    assert message in problems[0].message
    assert str(file) in problems[0].message


def test_a_folder_that_is_not_there_is_refused(mine: Folder) -> None:
    assert "is not a folder" in mine.problems()[0].message


def test_a_yml_file_is_told_to_be_renamed(mine: Folder) -> None:
    mine.write("model/x.yml", "hidden_size: 1\n")
    assert "rename it to x.yaml" in mine.problems("model=x")[0].message


def test_a_changed_file_is_read_again(mine: Folder) -> None:
    text = "sequence_length: 8\nglobal_batch_size: 2\nsteps: {}\n"
    file = mine.write("training/x.yaml", text.format(3))
    assert mine.load("training=x").training.steps == 3
    before = file.stat().st_mtime_ns
    file.write_text(text.format(4), encoding="utf-8")
    assert file.stat().st_mtime_ns != before
    assert mine.load("training=x").training.steps == 4


BODY = "# @package _global_\nparallel:\n  zero_stage: 1\n  data: auto\n"


def test_a_group_choice_contradicted_by_an_experiment_s_body_is_refused_naming_both(mine: Folder) -> None:
    file = mine.write("experiment/x.yaml", BODY)
    problems = mine.problems("+experiment=x", "parallel=zero3")
    assert [problem.key for problem in problems] == ["parallel.zero_stage"]
    assert "`parallel=zero3`" in problems[0].message
    assert f"{file} sets parallel.zero_stage to 1" in problems[0].message
    assert "parallel.zero_stage=3" in problems[0].fix


def test_a_key_on_the_command_line_settles_the_contradiction(mine: Folder) -> None:
    mine.write("experiment/x.yaml", BODY)
    assert mine.load("+experiment=x", "parallel=zero3", "parallel.zero_stage=3").parallel.zero_stage == 3


def test_a_group_choice_that_the_body_agrees_with_is_no_contradiction(mine: Folder) -> None:
    mine.write("experiment/x.yaml", BODY)
    assert mine.load("+experiment=x", "parallel=zero1").parallel.zero_stage == 1


def test_a_body_without_a_contradicting_choice_counts(mine: Folder) -> None:
    mine.write("experiment/x.yaml", BODY)
    assert mine.load("+experiment=x").parallel.zero_stage == 1


def test_a_gpu_choice_contradicted_by_a_cluster_s_figures_is_refused(mine: Folder) -> None:
    mine.write("cluster/lab.yaml", "gpu:\n  name: OURS\n  memory_gib: 10\n")
    assert {problem.key for problem in mine.problems("cluster=lab", "gpu=h200")} == {
        "cluster.gpu.name",
        "cluster.gpu.memory_gib",
    }


def test_a_foreign_models_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "models", raising=False)
    problems = locate.check_models_package()
    assert str(tmp_path / "models") in problems[0].message


def test_our_own_models_package_is_found() -> None:
    assert locate.check_models_package() == ()


def test_flattening_keeps_empty_maps_and_lists_as_values() -> None:
    assert dict(files.flatten({"a": {"b": 1, "c": {}}, "d": [1]}, "x")) == {"x.a.b": 1, "x.a.c": {}, "x.d": [1]}


def test_a_defaults_list_that_names_no_option_is_told_in_our_words(mine: Folder) -> None:
    mine.write("experiment/mine.yaml", "# @package _global_\ndefaults:\n  - override /parallel: zero33\n")
    (problem,) = mine.problems("+experiment=mine")
    assert problem.key == "parallel"
    assert "`parallel: zero33`" in problem.message
    assert "Did you mean `zero3`" in problem.fix
    assert "pkg://" not in problem.message


def test_a_broken_file_that_nobody_named_does_not_hide_what_is_wrong_with_the_named_one(mine: Folder) -> None:
    mine.write("experiment/mine.yaml", "# @package _global_\ndefaults:\n  - override /parallel: zero33\n")
    mine.write("experiment/unrelated.yaml", "a: [1,\n")
    (problem,) = mine.problems("+experiment=mine")
    assert problem.key == "parallel"


@pytest.mark.parametrize("name", ["héllo", "lauf-größe", "训练_1"])
def test_letters_outside_ascii_need_no_quotes(name: str) -> None:
    assert load_config([f"run.name={name}"]).run.name == name


@pytest.mark.parametrize("value", ["h(éllo", "[é", "é=1", "'é"])
def test_what_a_grammar_gives_a_meaning_is_not_guessed(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([f"run.name={value}"])
    assert "cannot be read" in caught.value.problems[0].message
