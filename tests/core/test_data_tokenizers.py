from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orchestrator.data.dataset import open_tokens
from orchestrator.data.tokenizers import ByteTokenizer, JsonTokenizer, open_tokenizer, token_type, tokenizer_identity
from orchestrator.errors import ConfigError
from tests.core.data_configs import data_config, write_files

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


def write_tokenizer(path: Path, special: tuple[str, ...] = ("<|endoftext|>",), vocab_size: int = 300) -> Tokenizer:
    """Train a byte-level BPE on a line of text and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path))
    return tokenizer


@given(st.text(max_size=40))
def test_bytes_are_their_own_ids_and_come_back(text: str) -> None:
    (ids,) = ByteTokenizer().encode([text.encode()])
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode([*ids.tolist(), ByteTokenizer.end_of_text]) == text


def test_a_tokenizer_json_gives_the_librarys_ids_and_finds_its_end_of_text(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    documents = ["the quick brown dog", "", "gr\u00fc\u00dfe\n"]
    ids = tokenizer.encode([document.encode() for document in documents])
    assert [document.tolist() for document in ids] == [library.encode(document).ids for document in documents]
    assert [tokenizer.decode(document.tolist()) for document in ids] == documents
    assert tokenizer.end_of_text == library.token_to_id("<|endoftext|>")
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_a_folder_stands_for_the_tokenizer_json_in_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer_identity(str(tmp_path)) == tokenizer_identity(str(tmp_path / "tokenizer.json"))


def test_truncation_and_padding_set_in_the_file_do_not_touch_the_text(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path / "tokenizer.json")
    untouched = library.encode(TEXT).ids
    library.enable_truncation(5)
    library.enable_padding(length=4096)
    library.save(str(tmp_path / "tokenizer.json"))
    (ids,) = open_tokenizer(str(tmp_path)).encode([TEXT.encode()])
    assert ids.tolist() == untouched


def test_the_eos_token_named_beside_the_file_is_the_end_of_text(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path / "tokenizer.json", special=("<|endoftext|>", "<|stop|>"))
    before = tokenizer_identity(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|stop|>"}}), encoding="utf-8"
    )
    assert open_tokenizer(str(tmp_path)).end_of_text == library.token_to_id("<|stop|>")
    assert tokenizer_identity(str(tmp_path)) != before, "other tokens under the same identity"


def test_a_tokenizer_without_end_of_text_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", special=("[PAD]",))
    with pytest.raises(ConfigError, match="no end-of-text token") as caught:
        open_tokenizer(str(tmp_path))
    assert "<|endoftext|>" in str(caught.value)
    assert "eos_token in a tokenizer_config.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"vocab": {}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_json_is_refused_without_a_traceback(tmp_path: Path, content: bytes) -> None:
    write_files(tmp_path, {"tokenizer.json": content})
    with pytest.raises(ConfigError, match="is not a tokenizer") as caught:
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert caught.value.problems[0].key == "data.tokenizer"


@pytest.mark.parametrize("name", ["nowhere.json", ""])
def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize(("vocab_size", "kind"), [(257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_tokens_take_two_bytes_while_every_id_fits(vocab_size: int, kind: type) -> None:
    assert token_type(vocab_size) is kind


def test_the_cache_holds_the_tokenizers_ids(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    write_files(tmp_path / "corpus", {"a.txt": TEXT, "b.txt": TEXT + "more\n"})
    config = data_config(
        vocab_size=300,
        source="text",
        path=str(tmp_path / "corpus"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        cache_directory=str(tmp_path / "cache"),
    )
    tokenizer = open_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, JsonTokenizer)
    train = open_tokens(config, "train")
    text = tokenizer.decode(train.sample(range(len(train)))[:, :-1].ravel().tolist())
    assert text.startswith(TEXT[: 8 * len(train)][:40])
    assert train.bytes_per_token is not None
    assert train.bytes_per_token > 1.5


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    size = write_tokenizer(tmp_path / "tokenizer.json").get_vocab_size()
    write_files(tmp_path / "corpus", {"a.txt": TEXT, "b.txt": TEXT})
    config = data_config(
        vocab_size=270,
        source="text",
        path=str(tmp_path / "corpus"),
        tokenizer=str(tmp_path),
        cache_directory=str(tmp_path / "cache"),
    )
    with pytest.raises(ConfigError) as caught:
        open_tokens(config, "train")
    (problem,) = caught.value.problems
    assert problem.key == "model.vocab_size"
    assert f"{size} ids" in problem.message
    assert "270" in problem.message
    assert f"at least {size}" in problem.fix
