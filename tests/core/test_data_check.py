from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.schema import RunConfig
from orchestrator.data import check as module
from orchestrator.data.check import check_data
from orchestrator.data.dataset import open_tokens
from tests.core.data_configs import data_config, write_files
from tests.core.test_data_tokenizers import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path, {f"corpus/{index}.txt": f"document {index}\n" * 10 for index in range(8)})
    write_files(
        tmp_path,
        {
            "binary/a.bin": b"good\xff",
            "empty/a.txt": "",
            "short/a.txt": "abc",
            "short/b.txt": "def",
            "a file": "text",
            "wrong.json": "{}",
        },
    )
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "nothing").mkdir()
    return tmp_path


def text_config(
    folder: Path, *, vocab_size: int = 257, training: dict[str, Any] | None = None, **data: Any
) -> RunConfig:
    values = {"source": "text", "path": "corpus", "cache_directory": "cache", **data}
    for key in ("path", "tokenizer", "cache_directory"):
        if values.get(key) not in (None, "bytes"):
            values[key] = str(folder / values[key])
    return data_config(vocab_size=vocab_size, training=training, **values)


@pytest.mark.parametrize("source", ["python_stdlib", "synthetic"])
def test_the_shipped_corpora_are_in_order(tmp_path: Path, source: str) -> None:
    assert check_data(data_config(source=source, cache_directory=str(tmp_path))) == ()


def test_a_folder_of_text_is_in_order_before_and_after_it_is_cached(folder: Path) -> None:
    config = text_config(folder)
    assert check_data(config) == ()
    open_tokens(config, "train")
    assert check_data(config) == ()


WRONG: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "no such path": ({"path": "no/such"}, "data.path", ("no/such does not exist", "does)", "Set data.path")),
    "no path": ({"path": None}, "data.path", ("data.path is not set",)),
    "a glob that matches nothing": ({"path": "corpus/*.md"}, "data.path", ("No file matches", "*.md")),
    "a path that is not used": (
        {"source": "python_stdlib"},
        "data.path",
        ("python_stdlib does not read it", "data.source=text"),
    ),
    "an empty folder": ({"path": "nothing"}, "data.path", ("holds no document",)),
    "only empty files": ({"path": "empty"}, "data.path", ("holds no document",)),
    "not text": ({"path": "binary"}, "data.path", ("a.bin is not UTF-8 text: byte 4 is 0xff", "iconv")),
    "no such tokenizer": ({"tokenizer": "no.json"}, "data.tokenizer", ("no.json does not exist", "`bytes`")),
    "not a tokenizer": ({"tokenizer": "wrong.json"}, "data.tokenizer", ("wrong.json is not a tokenizer.json",)),
    "a vocabulary smaller than the tokenizer": (
        {"vocab_size": 256},
        "model.vocab_size",
        ("257 ids", "is 256", "at least 257"),
    ),
    "too little text": (
        {"path": "short"},
        "training.sequence_length",
        ("takes 9 tokens", "train split has 4", "at most 3"),
    ),
    "no validation split": (
        {"validation_fraction": 0.0, "training": {"validate_every_steps": 5}},
        "data.validation_fraction",
        ("asks for validations", "keeps no document"),
    ),
    "a cache below a file": (
        {"cache_directory": "a file/cache"},
        "data.cache_directory",
        ("cannot be written", "a file/cache"),
    ),
    "a cache that is a file": ({"cache_directory": "a file"}, "data.cache_directory", ("cannot be written",)),
    "a tokenizer for random tokens": (
        {"source": "synthetic", "path": None, "tokenizer": "tokenizer.json"},
        "data.tokenizer",
        ("uses no tokenizer",),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_mistake_is_named_with_its_key_the_reason_and_the_remedy(folder: Path, case: str) -> None:
    values, key, parts = WRONG[case]
    problems = [problem for problem in check_data(text_config(folder, **values)) if problem.key == key]
    assert problems, "nothing was found"
    text = str(problems[0])
    assert [part for part in parts if part not in text] == [], text
    assert problems[0].fix


def test_several_mistakes_are_reported_together(folder: Path) -> None:
    config = text_config(folder, path="no/such", tokenizer="no.json", cache_directory="a file")
    assert sorted(problem.key for problem in check_data(config)) == [
        "data.cache_directory",
        "data.path",
        "data.tokenizer",
    ]


@pytest.mark.parametrize("cached", [False, True])
def test_both_splits_that_are_too_small_are_reported_cached_or_not(folder: Path, cached: bool) -> None:
    if cached:
        open_tokens(text_config(folder), "train")
    problems = check_data(text_config(folder, training={"sequence_length": 5000}))
    assert [problem.key for problem in problems] == ["training.sequence_length"] * 2
    assert "train split" in problems[0].message
    assert "validation split" in problems[1].message


def test_of_a_large_corpus_only_beginnings_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(module, "_LOOKED_AT_BYTES", 16)
    monkeypatch.setattr(module, "split_documents", lambda *_: pytest.fail("the corpus was read whole"))
    assert check_data(text_config(folder)) == ()
    # A character that the look cuts in two is no mistake, a byte that is none is one, and the end is not looked at.
    write_files(folder, {"corpus/cut.txt": "x" * 15 + "\u00e9" * 4, "corpus/late.txt": b"x" * 100 + b"\xff"})
    assert check_data(text_config(folder)) == ()
    write_files(folder, {"corpus/bad.txt": b"ab\xff" + b"x" * 100})
    (problem,) = check_data(text_config(folder))
    assert "bad.txt is not UTF-8 text: byte 2" in problem.message


def test_looking_writes_nothing_but_the_caches_folder(folder: Path) -> None:
    check_data(text_config(folder))
    assert list((folder / "cache").iterdir()) == []
