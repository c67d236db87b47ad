"""`checkpoint` as a user meets it: the command that an import suggests works, and what Ctrl-C leaves is told."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint import huggingface_import
from orchestrator.checkpoint.shard_reader import ShardReader
from orchestrator.checkpoint.start import check_start
from orchestrator.cli import checkpoint_verify
from orchestrator.cli.invocation import parse
from orchestrator.cli.main import main
from orchestrator.config.model_folder import model_of
from tests.core.test_checkpoint_huggingface import word_tokenizer, write

pytestmark = pytest.mark.torch


def stop(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def suggested(out: str) -> list[str]:
    """The words of the command that an import suggests."""
    (line,) = (line for line in out.splitlines() if line.startswith("train from it:"))
    return shlex.split(line.partition(":")[2])[3:]


def with_tokenizer(folder: Path) -> None:
    word_tokenizer(folder, "abc")


def with_another_kind_of_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")


@pytest.mark.parametrize("prepare", [with_tokenizer, with_another_kind_of_tokenizer, lambda folder: None])
def test_the_command_that_an_import_suggests_works(
    prepare: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "a model", changes={"max_position_embeddings": 512})
    prepare(folder)
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "its copy")]) == 0
    out = capsys.readouterr().out
    assert ("ITS_TOKENIZER stands for the one" in out) == (prepare is not with_tokenizer)
    (tmp_path / "texts").mkdir()
    stands_for = {"YOUR_TEXTS": str(tmp_path / "texts"), "ITS_TOKENIZER": "bytes"}
    words = []
    for word in suggested(out):
        key, _, value = word.partition("=")
        words.append(f"{key}={stands_for.get(value, value)}")
    config = parse(words).load()
    assert config.model == model_of(folder)
    assert config.data.tokenizer == (str(tmp_path / "its copy" / "tokenizer") if prepare is with_tokenizer else "bytes")
    assert check_start(config) == ()


def test_an_import_that_is_stopped_leaves_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "hf")
    monkeypatch.setattr(huggingface_import, "fill", stop)
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "own")]) == 4
    assert f"The import was stopped. Nothing is left of {tmp_path / 'own'}." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_that_is_stopped_leaves_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["checkpoint", "import", str(write(tmp_path / "hf")), str(tmp_path / "own")]) == 0
    monkeypatch.setattr(ShardReader, "read_data", stop)
    words = ["checkpoint", "export", str(tmp_path / "own"), str(tmp_path / "out"), "--tokenizer", "none"]
    assert main(words) == 4
    assert f"The export was stopped. Nothing is left of {tmp_path / 'out'}." in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "own"]


def test_what_a_second_interrupt_leaves_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_import, "fill", stop)
    with monkeypatch.context() as while_it_cleans_up:
        while_it_cleans_up.setattr("orchestrator.checkpoint.appearing.shutil.rmtree", stop)
        assert main(["checkpoint", "import", str(write(tmp_path / "hf")), str(tmp_path / "own")]) == 4
    (left,) = tmp_path.glob(".tmp-own-*")
    assert f"Unfinished and left: {left}. The same command removes it." in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "own")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "own"]


def test_a_look_that_is_stopped_says_that_nothing_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_verify, "places", stop)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 4
    assert "Stopped; nothing was written or changed." in capsys.readouterr().err
