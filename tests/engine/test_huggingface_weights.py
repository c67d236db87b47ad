"""Small models that transformers wrote: loaded under any plan, exported from any plan, and every planted fault seen.

One start of four gloo ranks loads every family under plans that cut by rows, by columns, by layers and twice the same
dimension; weights are compared bit for bit, logits within FP32 rounding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.registry import family
from orchestrator.checkpoint.folder import Checkpoint, open_checkpoint
from orchestrator.checkpoint.huggingface_export import export
from orchestrator.checkpoint.huggingface_folder import match, open_huggingface
from orchestrator.checkpoint.huggingface_import import import_weights
from orchestrator.checkpoint.huggingface_tokenizer import tokenizer_files
from orchestrator.checkpoint.tensors import CheckpointTensors
from orchestrator.config.model_folder import FolderError, model_of
from orchestrator.config.schema.model import ModelConfig, RopeScaling
from orchestrator.errors import ConfigError, RunError
from orchestrator.plan.run_plan import RunPlan
from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.gloo import live, on_ranks
from tests.engine.huggingface_ranks import Case, Loaded, loaded_under
from tests.engine.models_against_transformers import build_theirs, foreign_block

pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {
        "num_key_value_heads": 2,
        "rope_theta": 5e5,
        "rope_scaling": RopeScaling(rope_type="llama3", factor=8, original_max_position_embeddings=16),
    },
    "smollm": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "a vocabulary that ranks cut unevenly": {"vocab_size": 97, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 7, "head_dim": 16},
    "qwen2": {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "attention_output_bias": False,
        "tie_word_embeddings": True,
    },
    "gpt2": {"family": "gpt", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
}
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"parallel__data": 4, "parallel__zero_stage": 3},
    "TP 2 x ZeRO 2": {"parallel__tensor": 2, "parallel__data": 2, "parallel__zero_stage": 2},
    "PP 2 x TP 2": {"parallel__tensor": 2, "parallel__pipeline": 2},
}
MATRIX = [(name, split) for name in MODELS if name != "llama" for split in PLANS]
"""What is loaded under what; plain llama has nothing that the others have not."""
TOLERANCE = 2e-6
"""Largest difference of a logit over the largest logit."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder by model, as transformers saves it; the larger half of them cut into files with an index."""
    base = tmp_path_factory.mktemp("huggingface")
    for name, changes in MODELS.items():
        shards = {"max_shard_size": "20KB"} if name in ("llama3", "qwen2", "gpt2") else {}
        build_theirs(ModelConfig(**(SIZES | changes))).save_pretrained(base / name, **shards)
    return {name: base / name for name in MODELS}


def tokens() -> Tensor:
    return torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(5))


def plan_of(model: ModelConfig, **changes: Any) -> RunPlan:
    return tiny_plan(**{f"model__{key}": value for key, value in model.model_dump().items()}, **changes)


def theirs_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@cache
def expected(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """(our parameters by name, logits) as transformers has them."""
    model, theirs = model_of(folder), theirs_of(folder)
    foreign = dict(theirs.named_parameters())
    weights = family(model.family).foreign_weights(model)
    with torch.no_grad():
        logits = theirs(tokens(), use_cache=False).logits
    return {one.name: foreign_block(one, foreign[one.foreign]).detach() for one in weights}, logits


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture(scope="module")
def under_plans(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[list[Loaded], Path]]:
    """What every rank has of every model under every plan, and the checkpoints that they saved of it."""
    base = tmp_path_factory.mktemp("checkpoints")
    cases = [
        Case(plan_of(model_of(folders[name]), **PLANS[split]), folders[name], tokens(), checkpoints=base / f"{number}")
        for number, (name, split) in enumerate(MATRIX)
    ]
    by_rank = on_ranks(4, loaded_under, cases)
    return {
        pair: ([results[index] for results in by_rank], base / f"{index}" / "step-00000003")
        for index, pair in enumerate(MATRIX)
    }


def on_one(folder: Path, **changes: Any) -> Loaded:
    """The folder loaded by one rank."""
    ((only,),) = on_ranks(1, loaded_under, [Case(plan_of(model_of(folder), **changes), folder, tokens())])
    found: Loaded = only
    return found


def test_the_folders_are_what_they_stand_for(folders: dict[str, Path]) -> None:
    assert (folders["llama3"] / "model.safetensors.index.json").is_file()
    assert (folders["llama"] / "model.safetensors").is_file()
    assert model_of(folders["qwen2"]).attention_output_bias is False


# Loading


@pytest.mark.parametrize(("name", "split"), MATRIX)
def test_every_family_is_loaded_bit_for_bit_under_every_kind_of_plan(
    folders: dict[str, Path], under_plans: dict[tuple[str, str], tuple[list[Loaded], Path]], name: str, split: str
) -> None:
    wanted, logits = expected(folders[name])
    ranks, _ = under_plans[name, split]
    assert {key for rank in ranks for key in rank.parameters} == wanted.keys()
    for rank in ranks:
        for key, value in rank.parameters.items():
            assert torch.equal(value, wanted[key]), key
    heads = [rank.logits for rank in ranks if rank.logits is not None]
    assert heads
    for one in heads:
        assert relative(one, logits) <= TOLERANCE


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_pure"])
def test_weights_are_cast_to_the_type_that_the_run_keeps(
    folders: dict[str, Path], precision: str, tmp_path: Path
) -> None:
    halves = {name: value.bfloat16() for name, value in load_file(folders["smollm"] / "model.safetensors").items()}
    shutil.copytree(folders["smollm"], tmp_path / "hf")
    save_file(halves, tmp_path / "hf" / "model.safetensors")
    rank = on_one(tmp_path / "hf", training__precision=precision)
    kept = torch.bfloat16 if precision == "bf16_pure" else torch.float32
    for name, value in rank.parameters.items():
        assert value.dtype == kept
        assert torch.equal(value, expected(tmp_path / "hf")[0][name].to(kept)), name


def test_files_of_the_bare_model_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("smollm", "gpt2"):
        theirs_of(folders[name]).base_model.save_pretrained(tmp_path / name)
        assert match(open_huggingface(tmp_path / name), model_of(tmp_path / name))


def first_loss(model: ModelConfig, directory: Path, **changes: Any) -> float:
    """The loss of a run's first step, before anything is learned."""
    live(tasks_of(plan_of(model, training__steps=1, **changes), directory))
    loss: float = json.loads((directory / "metrics.jsonl").read_text())["loss"]
    return loss


def test_a_run_begins_with_the_weights_of_a_folder_and_of_a_checkpoint_made_of_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The folder is in BF16 and the runs in FP32: what is imported keeps its type and is cast by the run."""
    halves = {name: value.bfloat16() for name, value in load_file(folders["smollm"] / "model.safetensors").items()}
    shutil.copytree(folders["smollm"], tmp_path / "hf")
    save_file(halves, tmp_path / "hf" / "model.safetensors")
    checkpoint = imported(tmp_path / "hf", tmp_path / "own")
    assert CheckpointTensors(checkpoint).dtype("model.norm.weight") == torch.bfloat16
    model = model_of(Path(checkpoint.path))
    begun = {
        "folder": {"parallel__pipeline": 2, "checkpoint__init_from": str(tmp_path / "hf")},
        "checkpoint": {"parallel__data": 2, "parallel__zero_stage": 3, "checkpoint__init_from": checkpoint.path},
        "nothing": {},
    }
    losses = {name: first_loss(model, tmp_path / name, **changes) for name, changes in begun.items()}
    assert losses["folder"] == pytest.approx(losses["checkpoint"], abs=1e-5)
    assert abs(losses["folder"] - losses["nothing"]) > 0.01


# Exporting


@pytest.mark.parametrize(("name", "split"), MATRIX)
def test_a_checkpoint_of_any_plan_is_exported_bit_for_bit(
    folders: dict[str, Path],
    under_plans: dict[tuple[str, str], tuple[list[Loaded], Path]],
    name: str,
    split: str,
    tmp_path: Path,
) -> None:
    _, checkpoint = under_plans[name, split]
    opened = open_checkpoint(checkpoint)
    done = export(opened, tmp_path / "out", tokenizer=tokenizer_files("none"), max_shard_bytes=20_000)
    assert len(done.files) > 1
    assert all((tmp_path / "out" / file).stat().st_size < 25_000 for file in done.files)
    ours, theirs = (tensors_of(place) for place in (tmp_path / "out", folders[name]))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, read by the library."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def imported(folder: Path, target: Path) -> Checkpoint:
    model = model_of(folder)
    return import_weights(target, model, match(open_huggingface(folder), model), {})


@pytest.mark.parametrize("name", MODELS)
def test_what_is_imported_and_exported_again_is_bit_equal_and_loads(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(imported(folders[name], tmp_path / "own").path, read_bytes=True)
    export(checkpoint, tmp_path / "out", tokenizer=tokenizer_files("none"))
    again = dict(theirs_of(tmp_path / "out").named_parameters())
    for key, value in theirs_of(folders[name]).named_parameters():
        assert torch.equal(again[key], value), key
    with torch.no_grad():
        logits, wanted = (theirs_of(one)(tokens()).logits for one in (tmp_path / "out", folders[name]))
    assert torch.equal(logits, wanted)


def test_an_export_can_be_cast(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = imported(folders["llama"], tmp_path / "own")
    export(checkpoint, tmp_path / "out", tokenizer=tokenizer_files("none"), dtype=torch.bfloat16)
    halves, whole = (load_file(place / "model.safetensors") for place in (tmp_path / "out", folders["llama"]))
    assert halves.keys() == whole.keys()
    assert all(torch.equal(halves[name], whole[name].bfloat16()) for name in whole)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_failed_export_leaves_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    big = {name: value * 1e6 for name, value in load_file(folders["llama"] / "model.safetensors").items()}
    shutil.copytree(folders["llama"], tmp_path / "hf")
    save_file(big, tmp_path / "hf" / "model.safetensors")
    checkpoint = imported(tmp_path / "hf", tmp_path / "own")
    with pytest.raises(RunError, match=r"beyond 65504.*--dtype bf16"):
        export(checkpoint, tmp_path / "out", tokenizer=tokenizer_files("none"), dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "own"]


def test_nothing_is_written_over(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = imported(folders["llama"], tmp_path / "own")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export(checkpoint, tmp_path / "out", tokenizer=tokenizer_files("none"))
    assert list((tmp_path / "out").iterdir()) == []


# Faults that are planted and must be seen


def changed(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    return target


def in_metas_rotary_layout(tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        if name.endswith("q_proj.weight"):
            tensors[name] = value.view(4, 2, 4, -1).transpose(1, 2).reshape(value.shape)


def with_a_square_weight_transposed(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"].t()


def with_two_weights_swapped(tensors: dict[str, Tensor]) -> None:
    gate, up = "model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


@pytest.mark.parametrize(
    "change",
    [in_metas_rotary_layout, with_a_square_weight_transposed, with_two_weights_swapped],
    ids=lambda f: f.__name__,
)
def test_a_fault_that_no_shape_shows_changes_the_logits(
    folders: dict[str, Path], change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    """The comparison of logits is what sees it: it must be far above the tolerance."""
    wrong = changed(folders["llama"], tmp_path / "wrong", change)
    logits = on_one(wrong).logits
    assert logits is not None
    assert relative(logits, expected(folders["llama"])[1]) > 1000 * TOLERANCE


def with_an_oblong_weight_transposed(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].t()


def with_a_row_too_few(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]


def with_another_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def with_a_name_lost_and_one_added(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.mlp.up_proj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (with_an_oblong_weight_transposed, ["up_proj.weight has shape [32, 64], the model has [64, 32]"]),
        (with_a_row_too_few, ["embed_tokens.weight has shape [95, 32], the model has [96, 32]"]),
        (with_another_head, ["lm_head.weight differs from model.embed_tokens.weight"]),
        (
            with_a_name_lost_and_one_added,
            [
                "1 tensors are missing: model.layers.0.mlp.up_proj.weight",
                "1 tensors are not part of the model: model.layers.3.mlp.up_proj.weight",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_that_a_header_shows_is_named(
    folders: dict[str, Path], change: Callable[[dict[str, Tensor]], None], faults: list[str], tmp_path: Path
) -> None:
    wrong = changed(folders["smollm"], tmp_path / "wrong", change)
    with pytest.raises(FolderError) as refused:
        match(open_huggingface(wrong), model_of(wrong))
    assert len(refused.value.faults) == len(faults)
    for said, fault in zip(refused.value.faults, faults, strict=True):
        assert fault in said


def test_a_head_that_is_a_copy_of_the_embedding_is_no_fault(folders: dict[str, Path], tmp_path: Path) -> None:
    def copy(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    same = changed(folders["smollm"], tmp_path / "same", copy)
    assert "head.weight" not in match(open_huggingface(same), model_of(same))


def test_a_file_that_is_damaged_after_the_check_ends_every_rank(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(AssertionError) as failed:
        on_ranks(
            2, loaded_under, [Case(plan_of(model_of(tmp_path / "hf"), parallel__data=2), tmp_path / "hf", tokens())]
        )
    assert str(failed.value).count("it is cut or damaged") >= 2
