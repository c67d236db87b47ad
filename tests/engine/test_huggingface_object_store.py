"""Hugging Face models in an object store, in and out, against a real S3-speaking server that all tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from orchestrator.checkpoint import object_storage
from orchestrator.checkpoint.appearing import appearing_at
from orchestrator.checkpoint.huggingface_folder import is_huggingface, match, open_huggingface
from orchestrator.checkpoint.huggingface_import import import_weights
from orchestrator.checkpoint.safetensors_file import read_blocks
from orchestrator.checkpoint.shard_reader import ShardReader
from orchestrator.checkpoint.start import check_start
from orchestrator.checkpoint.storage import open_folder
from orchestrator.cli.main import main
from orchestrator.config.model_folder import model_of
from tests.core.test_checkpoint_huggingface import starting_from, with_index, word_tokenizer, write
from tests.engine.cases import tasks_of, tiny_plan
from tests.engine.gloo import live
from tests.engine.object_store import BUCKET, ObjectStore, object_store

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def store(server: ObjectStore) -> ObjectStore:
    server.faults.clear()
    server.asked.clear()
    return server


@pytest.fixture
def place(store: ObjectStore, request: pytest.FixtureRequest) -> str:
    """A URL that no other test uses."""
    return store.url(request.node.name)


def files_at(place: str) -> list[str]:
    return sorted(open_folder(place).files())


def upload(folder: Path, place: str) -> str:
    """The files of a folder, copied to a URL."""
    for file in folder.iterdir():
        open_folder(place).write_whole(file.name, file.read_bytes())
    return place


def imported(folder: Path, target: str) -> None:
    model = model_of(folder)
    import_weights(target, model, match(open_huggingface(folder), model), {})


def same_tensors(one: Path, other: Path) -> bool:
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_in_an_object_store_is_exported(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(write(tmp_path / "hf"), place)
    assert main(["checkpoint", "export", place, str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    assert same_tensors(tmp_path / "hf", tmp_path / "out")


def test_what_is_exported_to_a_store_is_imported_from_it_bit_for_bit(
    store: ObjectStore, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(write(tmp_path / "hf"), str(tmp_path / "own"))
    words = ["--max-shard-size", "4KB", "--tokenizer", "bytes"]
    assert main(["checkpoint", "export", str(tmp_path / "own"), f"{place}/", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == place
    written = [path.partition("?")[0].rpartition("/")[2] for method, path in store.asked if method == "PUT"]
    assert written[-1] == "config.json", "what makes it a model comes last"
    names = files_at(place)
    assert len([name for name in names if name.endswith(".safetensors")]) > 2
    assert {"model.safetensors.index.json", "tokenizer.json", "generation_config.json"} < set(names)
    assert not [name for name in names if name.startswith(".")]
    assert main(["checkpoint", "import", place, str(tmp_path / "again")]) == 0
    assert f"data.tokenizer={tmp_path / 'again' / 'tokenizer'}" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(tmp_path / "again"), str(tmp_path / "out")]) == 0
    assert same_tensors(tmp_path / "hf", tmp_path / "out")


def test_keys_of_the_model_can_be_set_in_an_import_from_a_store(place: str, tmp_path: Path) -> None:
    upload(write(tmp_path / "hf"), place)
    words = [place, str(tmp_path / "own"), "model.attention_dropout=0.1"]
    assert main(["checkpoint", "import", *words]) == 0
    manifest = json.loads((tmp_path / "own" / "step-00000000" / "manifest.json").read_text())
    assert manifest["config"]["model"]["attention_dropout"] == 0.1
    assert manifest["config"]["imported_from"] == place


def test_a_run_begins_with_the_weights_of_a_store(store: ObjectStore, place: str, tmp_path: Path) -> None:
    """Under a plan whose ranks read columns as well as rows, and as from a folder to the last bit."""
    folder = with_index(write(tmp_path / "hf"))
    upload(folder, place)
    sizes = {f"model__{key}": value for key, value in model_of(folder).model_dump().items()}
    losses = []
    for number, start in enumerate((str(folder), place)):
        plan = tiny_plan(**sizes, parallel__tensor=2, training__steps=1, checkpoint__init_from=start)
        live(tasks_of(plan, tmp_path / f"{number}", environment=store.environment()))
        losses.append(json.loads((tmp_path / f"{number}" / "metrics.jsonl").read_text())["loss"])
    assert losses[0] == losses[1]


def test_weights_in_a_store_are_judged_as_those_in_a_folder(place: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "hf")
    word_tokenizer(folder, "Thequick")
    upload(folder, place)
    assert is_huggingface(place)
    assert is_huggingface(f"{place}/model.safetensors")
    (problem,) = check_start(starting_from(place))
    assert problem.key == "data.tokenizer"
    assert problem.fix.startswith("Copy its tokenizer.json")
    assert (
        check_start(starting_from(place, {"data.source": "text", "data.path": "x", "data.tokenizer": str(folder)}))
        == ()
    )
    problems = check_start(starting_from(place, {"data.source": "synthetic", "model.hidden_size": 16}))
    assert [problem.fix for problem in problems] == ["Set model.hidden_size=8."]


def test_a_store_is_asked_for_little_more_than_what_is_read(
    store: ObjectStore, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers cost no weights; a tensor is read in one piece, and further ahead the longer reading goes on."""
    upload(write(tmp_path / "hf"), place)
    got: list[int] = []
    fetch = object_storage._Reading._fetch

    def counted(self: Any, begin: int, wanted: int) -> None:
        fetch(self, begin, wanted)
        got.append(len(self._ahead))

    monkeypatch.setattr(object_storage._Reading, "_fetch", counted)
    monkeypatch.setattr(object_storage, "_FIRST_AHEAD_BYTES", 1000)
    monkeypatch.setattr(object_storage, "_PART_BYTES", 4000)
    tensors = open_huggingface(place).tensors
    assert sum(got) < 6000
    got.clear()
    tensor = tensors["model.embed_tokens.weight"]
    for _ in read_blocks(tensor, (0, 0), tensor.shape, block_bytes=64):
        pass
    assert got == [1000, 2000, 4000, 4000], "more each time, and never more than a part"


def test_nothing_is_written_over_and_two_exports_do_not_mix(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(write(tmp_path / "hf"), str(tmp_path / "own"))
    folder = open_folder(place)
    with appearing_at(folder), pytest.raises(FileExistsError, match="somebody else"), appearing_at(folder):
        pass
    assert files_at(place) == []
    folder.write_whole("notes.txt", b"mine")
    assert main(["checkpoint", "export", str(tmp_path / "own"), place, "--tokenizer", "none"]) == 2
    assert "holds notes.txt, and nothing is written over" in " ".join(capsys.readouterr().err.split())
    assert files_at(place) == ["notes.txt"]


def test_an_export_that_the_store_refuses_on_the_way_leaves_nothing(
    store: ObjectStore, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(write(tmp_path / "hf"), str(tmp_path / "own"))
    store.answer(403, "AccessDenied", method="PUT", part="model-00002", times=1000)
    words = ["--max-shard-size", "4KB", "--tokenizer", "none"]
    assert main(["checkpoint", "export", str(tmp_path / "own"), place, *words]) == 3
    said = capsys.readouterr().err
    assert said.startswith("`checkpoint export` failed.\n1. ")
    assert "refuses our credentials" in " ".join(said.split())
    assert files_at(place) == []
    uploads = store.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert not [upload for upload in uploads if upload["Key"].startswith(place.partition(f"{BUCKET}/")[2])]


def test_an_export_that_is_stopped_leaves_nothing_and_says_so(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(write(tmp_path / "hf"), str(tmp_path / "own"))

    def stop(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardReader, "read_data", stop)
    assert main(["checkpoint", "export", str(tmp_path / "own"), place, "--tokenizer", "none"]) == 4
    assert f"The export was stopped. Nothing is left of {place}." in capsys.readouterr().err
    assert files_at(place) == []


@pytest.mark.parametrize("target", ["s3://bucket/place", "s3:/bucket/place", "gs://bucket/place"])
def test_an_import_goes_to_a_file_system(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "import", str(write(tmp_path / "hf")), target]) == 2
    assert "an import writes to a file system" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("target", ["s3:/bucket/place", "gs://bucket/place", "s3://bucket"])
def test_a_target_that_is_no_url_of_a_store_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(write(tmp_path / "hf"), str(tmp_path / "own"))
    assert main(["checkpoint", "export", str(tmp_path / "own"), target, "--tokenizer", "none"]) == 2
    assert f"{target} cannot be used" in " ".join(capsys.readouterr().err.split())
