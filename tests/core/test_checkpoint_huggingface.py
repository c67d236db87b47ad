"""Hugging Face folders as files, without torch: what is found, what is refused, and what a start from one needs."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from models.registry import family
from models.spec import parameter_specs
from orchestrator.checkpoint.appearing import appearing
from orchestrator.checkpoint.huggingface_folder import is_huggingface, match, open_huggingface
from orchestrator.checkpoint.huggingface_tokenizer import byte_letters, tokenizer_files
from orchestrator.checkpoint.safetensors_file import header_bytes, read_blocks, read_header, same_values
from orchestrator.checkpoint.start import check_start
from orchestrator.checkpoint.storage import LocalFolder
from orchestrator.cli.invocation import parse
from orchestrator.config.compose import load_config
from orchestrator.config.model_folder import FolderError, model_of
from orchestrator.config.schema import ModelConfig, RunConfig
from orchestrator.data.tokenizers import ByteTokenizer, open_tokenizer
from orchestrator.errors import ConfigError
from tests.core.run_cases import run_config

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
}


def write(folder: Path, *, changes: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> Path:
    """A folder of that model, its values random; `config` changes its config.json alone."""
    model = ModelConfig(**(SIZES | (changes or {})))
    folder.mkdir(parents=True, exist_ok=True)
    written, _ = family(model.family).config_from_sizes(model)
    (folder / "config.json").write_text(json.dumps(written | (config or {})))
    generator = np.random.default_rng(0)
    shapes = {spec.name: spec.shape for spec in parameter_specs(model)}
    tensors = {
        weight.foreign: generator.standard_normal(weight.foreign_shape(shapes[weight.name]), dtype=np.float32)
        for weight in family(model.family).foreign_weights(model)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_index(folder: Path) -> Path:
    """The folder's one file cut in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    places = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    return folder


def starting_from(folder: Path | str, changes: dict[str, Any] | None = None) -> RunConfig:
    return run_config("runs", {"checkpoint.init_from": str(folder), **(changes or {})})


def faults_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(FolderError) as refused:
        match(open_huggingface(folder), model_of(folder))
    return refused.value.faults


# Files


def test_one_file_an_index_and_the_path_of_either_are_the_same_model(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    cut = with_index(write(tmp_path / "cut"))
    wanted = {name: tensor.shape for name, tensor in open_huggingface(whole).tensors.items()}
    for path in (whole / "model.safetensors", cut, cut / "model.safetensors.index.json"):
        assert is_huggingface(path)
        found = open_huggingface(path)
        assert {name: tensor.shape for name, tensor in found.tensors.items()} == wanted
        assert match(found, model_of(path if path.is_dir() else path.parent))


def test_everything_that_is_wrong_with_the_files_is_told_at_once(tmp_path: Path) -> None:
    folder = with_index(write(tmp_path / "hf"))
    (folder / "config.json").unlink()
    (folder / "a.safetensors").unlink()
    whole = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(whole[:-1])
    faults = faults_of(folder)
    assert len(faults) == 3
    assert faults[0] == "config.json is missing"
    assert faults[1] == "a.safetensors: it cannot be read: No such file or directory"
    assert "b.safetensors" in faults[2]
    assert "cut or damaged" in faults[2]


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path) -> None:
    folder = with_index(write(tmp_path / "hf"))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    places["weight_map"]["model.norm.weight"] = other[places["weight_map"]["model.norm.weight"]]
    index.write_text(json.dumps(places))
    (fault,) = faults_of(folder)
    assert "1 tensors are not in the file that model.safetensors.index.json names" in fault


def test_several_files_without_an_index_are_not_guessed_at(tmp_path: Path) -> None:
    folder = with_index(write(tmp_path / "hf"))
    (folder / "model.safetensors.index.json").unlink()
    (fault,) = faults_of(folder)
    assert "2 safetensors files and no model.safetensors.index.json" in fault


def test_weights_in_another_format_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (fault,) = faults_of(folder)
    assert "pytorch_model.bin: save it again as safetensors" in fault


def test_quantised_weights_are_refused_by_their_type(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    (fault,) = faults_of(folder)
    assert fault == "model.norm.weight is I8, and only F64, F32, F16, BF16 are read as weights"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x04" + b"\0" * 7 + b"nope"])
def test_what_is_no_safetensors_file_is_refused(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(damage)
    with pytest.raises(ValueError, match="safetensors"):
        read_header(LocalFolder(tmp_path), "x.safetensors")


def test_a_header_that_lies_about_a_size_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(ValueError, match=r"gives w 8 bytes, F32 \[3\] needs 12"):
        read_header(LocalFolder(tmp_path), "x.safetensors")


def test_our_header_is_read_by_the_library(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    header = header_bytes({"b": ("F32", (3, 4)), "a": ("F16", (2,))})
    (tmp_path / "x.safetensors").write_bytes(header + values.tobytes() + np.ones(2, np.float16).tobytes())
    read = load_file(tmp_path / "x.safetensors")
    assert np.array_equal(read["b"], values)
    assert np.array_equal(read["a"], np.ones(2, np.float16))


@pytest.mark.parametrize("block_bytes", [1, 100, 10**9])
@pytest.mark.parametrize(
    ("shape", "start", "extent"),
    [
        ((7, 5), (0, 0), (7, 5)),
        ((7, 5), (2, 1), (4, 3)),
        ((7, 5), (6, 4), (1, 1)),
        ((3, 5000), (1, 1200), (2, 2100)),
        ((9,), (2,), (5,)),
        ((7, 5), (3, 0), (0, 5)),
    ],
)
def test_any_region_is_read_as_numpy_cuts_it(
    shape: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...], block_bytes: int, tmp_path: Path
) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    save_file({"first": np.zeros(3, np.float32), "w": values}, tmp_path / "x.safetensors")
    tensor = read_header(LocalFolder(tmp_path), "x.safetensors")["w"]
    wanted = values[tuple(slice(low, low + size) for low, size in zip(start, extent, strict=True))]
    found, rows = b"", 0
    for first, count, data in read_blocks(tensor, start, extent, block_bytes):
        assert first == rows
        rows += count
        found += bytes(data)
    assert found == wanted.tobytes()


def test_values_are_compared_as_bytes(tmp_path: Path) -> None:
    values = np.ones((4, 4), np.float32)
    other = values.copy()
    other[3, 3] = 2
    save_file({"a": values, "b": values, "c": other, "d": values.astype(np.float16)}, tmp_path / "x.safetensors")
    tensors = read_header(LocalFolder(tmp_path), "x.safetensors")
    assert same_values(tensors["a"], tensors["b"])
    assert not same_values(tensors["a"], tensors["c"])
    assert not same_values(tensors["a"], tensors["d"])


# Starting from one


def test_a_folder_of_this_model_is_fine(tmp_path: Path) -> None:
    assert check_start(starting_from(write(tmp_path / "hf"))) == ()


def test_every_size_that_differs_is_named_with_its_remedy(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf")
    asked = {"model.hidden_size": 16, "model.vocab_size": 300, "model.rope_theta": 5e5, "model.attention_bias": True}
    problems = check_start(starting_from(folder, asked))
    named = [problem.key for problem in problems]
    # A head's features follow from the width and are not told apart.
    wanted = ["hidden_size", "vocab_size", "rope_theta", "attention_bias", "attention_output_bias"]
    assert sorted(named) == sorted(f"model.{name}" for name in wanted)
    (vocabulary,) = (problem for problem in problems if problem.key == "model.vocab_size")
    assert "vocab_size=257, model.vocab_size=300 is asked for" in vocabulary.message
    assert vocabulary.fix == f"Set model.vocab_size=257; `model={folder}` takes every size from there."


def test_what_weights_do_not_depend_on_may_differ(tmp_path: Path) -> None:
    changes = {"model.max_position_embeddings": 32, "model.attention_dropout": 0.1, "model.initializer_range": 0.5}
    explicit = {"model.num_key_value_heads": 2, "model.head_dim": 4, "model.attention_bias": False}
    assert check_start(starting_from(write(tmp_path / "hf"), changes | explicit)) == ()


def test_learned_positions_are_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", changes={"family": "gpt"})
    changes = {"model.family": "gpt", "model.max_position_embeddings": 32}
    assert [problem.key for problem in check_start(starting_from(folder, changes))] == ["model.max_position_embeddings"]


def test_unknown_keys_of_the_configuration_are_named_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", config={"attn_logit_softcapping": 30.0, "hidden_act": "relu"})
    problems = check_start(starting_from(folder))
    assert len(problems) == 2
    told = " ".join(problem.message for problem in problems)
    assert "attn_logit_softcapping is not known here" in told
    assert "hidden_act ='relu' is not implemented" in told.replace("hidden_act=", "hidden_act =")
    assert all("take it out of config.json" in problem.fix for problem in problems)


def test_a_model_that_is_not_implemented_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (problem,) = check_start(starting_from(write(tmp_path / "hf", config={"model_type": "mamba"})))
    assert "model_type='mamba' is not implemented; there are llama, mistral, qwen2, gpt2" in problem.message


def test_files_and_sizes_are_judged_in_one_go(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["stranger"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    problems = check_start(starting_from(folder, {"model.num_hidden_layers": 3}))
    assert [problem.key for problem in problems] == ["model.num_hidden_layers", *["checkpoint.init_from"] * 2]
    assert "1 tensors are missing: model.norm.weight" in problems[1].message
    assert "1 tensors are not part of the model: stranger" in problems[2].message


# The tokenizer


def word_tokenizer(folder: Path, words: str) -> None:
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_text_must_be_cut_as_the_weights_learned_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf")
    word_tokenizer(folder, "Thequick")
    word_tokenizer(tmp_path / "same", "Thequick")
    word_tokenizer(tmp_path / "other", "quickThe")
    (problem,) = check_start(starting_from(folder))
    assert problem.key == "data.tokenizer"
    assert f"Set data.tokenizer={folder}" in problem.fix
    assert check_start(starting_from(folder, {"data.source": "synthetic"})) == ()
    for name, wanted in (("hf", 0), ("same", 0), ("other", 1)):
        changes = {"data.source": "text", "data.path": "x", "data.tokenizer": str(tmp_path / name)}
        assert len(check_start(starting_from(folder, changes))) == wanted, name


def test_bytes_are_exported_as_a_tokenizer_with_the_same_ids(tmp_path: Path) -> None:
    files = tokenizer_files("bytes")
    files.write(tmp_path)
    theirs, ours = open_tokenizer(str(tmp_path)), ByteTokenizer()
    assert (theirs.vocab_size, theirs.end_of_text) == (ours.vocab_size, ours.end_of_text)
    text = "".join(map(chr, range(0x250))) + "你好 😀\r\n\t  def f(x): return '</s>'  \u2028 e\u0301"
    pieces = [text.encode(), b"", b"   ", b"\0"]
    for mine, other in zip(ours.encode(pieces), theirs.encode(pieces), strict=True):
        assert mine.tolist() == other.tolist()
    ids = ours.encode([text.encode()])[0].tolist()
    assert theirs.decode(ids) == text
    assert files.special_ids == {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    assert len(set(byte_letters())) == 256


def test_weights_that_learned_bytes_go_on_with_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf")
    tokenizer_files("bytes").write(folder)
    assert check_start(starting_from(folder)) == ()


def test_a_tokenizer_that_is_gone_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        tokenizer_files(str(tmp_path / "gone"))
    (problem,) = refused.value.problems
    assert problem.key == "--tokenizer"
    assert "--tokenizer none" in problem.fix


def test_a_tokenizer_without_settings_gets_those_that_transformers_needs(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "words", "abc")
    files = tokenizer_files(str(tmp_path / "words"))
    (tmp_path / "out").mkdir()
    files.write(tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert files.special_ids["eos_token_id"] == 1


# A folder as the model


def test_a_folder_gives_every_size_of_the_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", changes={"num_key_value_heads": 1, "rope_theta": 5e5})
    config = load_config([f"model={folder}", "training.sequence_length=16"])
    assert config.model == model_of(folder)
    assert load_config([f"model={folder}", "model.attention_dropout=0.1"]).model.attention_dropout == 0.1
    assert load_config(["+experiment=llama3_8b", f"model={folder}"]).model.rope_scaling is None


def test_a_folder_that_is_no_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "gone", "does not exist"), (tmp_path, "config.json is missing")):
        with pytest.raises(ConfigError, match=reason) as refused:
            load_config([f"model={path}"])
        assert [problem.key for problem in refused.value.problems] == ["model"]


def test_the_path_of_a_checkpoint_is_a_model_too(tmp_path: Path) -> None:
    config = run_config("runs")
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"config": config.to_dict()}))
    assert load_config([f"model={folder}"]).model == config.model


# Folders that appear whole


def kill_while_writing(target: Path) -> None:
    """A process that is killed while it writes `target`."""
    script = f"""
import os, signal
from pathlib import Path
from orchestrator.checkpoint.appearing import appearing
with appearing(Path({str(target)!r})) as folder:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_writer_left_is_no_folder_and_goes_with_the_next(tmp_path: Path) -> None:
    kill_while_writing(tmp_path / "out")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-out-")
    with appearing(tmp_path / "out") as folder:
        assert list(tmp_path.iterdir()) == [folder]
        (folder / "whole").write_text("whole")
        with appearing(tmp_path / "out") as other:
            assert folder.is_dir(), "a living writer's folder stays"
            (other / "first").write_text("first")
        (tmp_path / "out" / "first").rename(tmp_path / "kept")
        (tmp_path / "out").rmdir()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def test_a_folder_that_appears_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), appearing(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# What the README says


def test_the_commands_of_the_readme_are_accepted(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", changes={"max_position_embeddings": 512})
    tokenizer_files("bytes").write(folder)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    block = readme.partition("<!-- commands: huggingface -->\n```bash\n")[2].partition("```")[0]
    first, *commands = block.strip().splitlines()
    assert first.startswith("HF=")
    typed = [parse(shlex.split(line.replace("$HF", str(folder)))[3:]) for line in commands]
    assert [one.problems for one in typed] == [[], [], []]
    assert [" ".join(one.overrides[:1]) for one in typed[1:]] == ["import", "export"]
    assert typed[2].options == {"--dtype": "bf16", "--max-shard-size": "2GB"}
    config = typed[0].load()
    assert config.model == model_of(folder)
    assert check_start(config) == ()
