"""A checkpoint in an object store is exported as one in a folder, against a real S3-speaking server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from orchestrator.checkpoint.huggingface_folder import match, open_huggingface
from orchestrator.checkpoint.huggingface_import import import_weights
from orchestrator.cli.main import main
from orchestrator.config.model_folder import model_of
from tests.core.test_checkpoint_huggingface import write
from tests.engine.object_store import object_store

pytestmark = pytest.mark.torch


def test_a_checkpoint_in_an_object_store_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "hf")
    model = model_of(folder)
    with object_store() as server:
        import_weights(server.url("weights"), model, match(open_huggingface(folder), model), {})
        assert main(["checkpoint", "export", server.url("weights"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("word", ["import", "export"])
def test_neither_is_written_into_an_object_store(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", word, str(write(tmp_path / "hf")), "s3://bucket/place"]) == 2
    assert "this writes to a file system" in capsys.readouterr().err
