from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.config.schema import RunConfig
from orchestrator.data import cache as cache_module
from orchestrator.data import corpora
from orchestrator.data.cache import open_cache
from orchestrator.data.dataset import TextTokens, open_tokens, validation_ids
from orchestrator.data.tokenizers import ByteTokenizer
from orchestrator.errors import ConfigError
from tests.core.data_configs import data_config, write_files

FILES: dict[str, str | bytes] = {f"{index}.txt": f"document {index}\n" * (index + 1) for index in range(12)}


@pytest.fixture
def corpus(tmp_path: Path) -> RunConfig:
    write_files(tmp_path / "corpus", FILES)
    return config_of(tmp_path / "corpus", tmp_path / "cache")


def config_of(corpus: Path, cache: Path, fraction: float = 0.3) -> RunConfig:
    return data_config(source="text", path=str(corpus), cache_directory=str(cache), validation_fraction=fraction)


def documents_of(tokens: np.ndarray) -> list[str]:
    """The documents in a token file, split at end-of-text."""
    ends = np.flatnonzero(tokens == ByteTokenizer.end_of_text)
    return [bytes(part[part < 256].astype(np.uint8)).decode() for part in np.split(tokens, ends + 1)[:-1]]


def test_every_document_is_in_exactly_one_split_and_closed_by_end_of_text(corpus: RunConfig) -> None:
    cache = open_cache(corpus)
    train, validation = documents_of(cache.tokens("train")), documents_of(cache.tokens("validation"))
    assert sorted(train + validation) == sorted(FILES.values())
    assert validation
    assert cache.facts.train.documents == len(train)
    assert cache.facts.train.size_bytes == sum(map(len, train))
    assert cache.tokens("train").dtype == np.uint16


def test_samples_are_consecutive_windows_that_share_one_token(corpus: RunConfig) -> None:
    dataset = open_tokens(corpus, "train")
    assert isinstance(dataset, TextTokens)
    samples = dataset.sample(np.arange(len(dataset)))
    assert samples.shape == (len(dataset), 9)
    assert samples.dtype == np.int64
    assert np.array_equal(samples[1:, 0], samples[:-1, -1])
    assert np.array_equal(samples[:, :-1].ravel(), dataset.tokens[: len(dataset) * 8])
    assert len(dataset.tokens) - 1 - len(dataset) * 8 < 8
    assert dataset.bytes_per_token == pytest.approx(dataset.size_bytes / len(dataset.tokens))


@pytest.mark.parametrize("ids", [[-1], [10**9], [0, 10**9]])
def test_a_sample_that_does_not_exist_is_refused(corpus: RunConfig, ids: list[int]) -> None:
    with pytest.raises(IndexError, match="sample ids must lie in"):
        open_tokens(corpus, "train").sample(ids)


def test_validation_reads_the_first_samples_or_all(corpus: RunConfig) -> None:
    dataset = open_tokens(corpus, "validation")
    assert validation_ids(dataset, 3).tolist() == [0, 1, 2]
    assert len(validation_ids(dataset, 10**6)) == len(dataset)


def test_an_unchanged_corpus_is_not_read_again(corpus: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_cache(corpus)

    def refuse(*_: object) -> None:
        raise AssertionError("a document was read")

    monkeypatch.setattr(cache_module, "split_documents", refuse)
    monkeypatch.setattr(cache_module, "read_pieces", refuse)
    assert open_cache(corpus) == first


def test_a_touched_file_is_read_again_but_gives_the_same_cache(
    corpus: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_cache(corpus)
    assert corpus.data.path
    os.utime(Path(corpus.data.path, "3.txt"), ns=(10**18, 10**18))
    monkeypatch.setattr(cache_module, "_build", None)
    assert open_cache(corpus) == first


@pytest.mark.parametrize("change", ["content of the same size", "added", "removed", "renamed", "fraction"])
def test_any_change_of_what_is_learned_from_is_noticed(corpus: RunConfig, tmp_path: Path, change: str) -> None:
    before = open_cache(corpus).facts.fingerprint
    folder = tmp_path / "corpus"
    changed = corpus
    if change == "content of the same size":
        (folder / "5.txt").write_text(str(FILES["5.txt"]).replace("document", "DOCUMENT"), encoding="utf-8")
    elif change == "added":
        write_files(folder, {"new.txt": "new"})
    elif change == "removed":
        (folder / "5.txt").unlink()
    elif change == "renamed":
        (folder / "5.txt").rename(folder / "five.txt")
    else:
        changed = config_of(folder, tmp_path / "cache", fraction=0.31)
    assert open_cache(changed).facts.fingerprint != before


def test_a_file_changed_a_moment_ago_is_not_trusted_to_stay(corpus: RunConfig, tmp_path: Path) -> None:
    """Within one tick of the file system's clock a second change shows neither in the time nor, here, in the size."""
    path = tmp_path / "corpus" / "5.txt"
    path.write_text("first\n", encoding="utf-8")
    written = path.stat().st_mtime_ns
    before = open_cache(corpus).facts.fingerprint
    path.write_text("other\n", encoding="utf-8")
    os.utime(path, ns=(written, written))
    assert open_cache(corpus).facts.fingerprint != before


def test_the_fingerprint_names_no_place(corpus: RunConfig, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "corpus", tmp_path / "other" / "copy")
    elsewhere = config_of(tmp_path / "other" / "copy", tmp_path / "other" / "cache")
    first, second = open_tokens(corpus, "train"), open_tokens(elsewhere, "train")
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.sample([0, 1]), second.sample([0, 1]))


@pytest.mark.parametrize(
    "damage", ["truncated", "overwritten", "no meta", "half a meta", "other format", "file missing"]
)
def test_a_damaged_cache_is_recognised_and_built_again(corpus: RunConfig, damage: str) -> None:
    sound = open_cache(corpus)
    before = sound.tokens("train").copy()
    tokens, meta = sound.directory / "train.bin", sound.directory / "meta.json"
    if damage == "truncated":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif damage == "overwritten":
        tokens.write_bytes(bytes(tokens.stat().st_size))
    elif damage == "no meta":
        meta.unlink()
    elif damage == "half a meta":
        meta.write_text(meta.read_text(encoding="utf-8")[:20], encoding="utf-8")
    elif damage == "other format":
        meta.write_text(json.dumps({**json.loads(meta.read_text(encoding="utf-8")), "format": 0}), encoding="utf-8")
    else:
        tokens.unlink()
    again = open_cache(corpus)
    assert np.array_equal(again.tokens("train"), before)
    assert [path.name for path in again.directory.parent.iterdir()] == [again.directory.name], "leftovers"


def _die_before_the_rename(config: RunConfig) -> None:
    cache_module._rename_into_place = lambda *_: os._exit(9)  # type: ignore[assignment]
    open_cache(config)


def test_a_builder_killed_half_way_leaves_nothing_that_is_taken_for_a_cache(corpus: RunConfig, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die_before_the_rename, args=(corpus,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    (leftover,) = (tmp_path / "cache" / "tokens").iterdir()
    assert (leftover / "meta.json").exists(), "it died too early to show anything"
    cache = open_cache(corpus)
    assert sorted(documents_of(cache.tokens("train")) + documents_of(cache.tokens("validation"))) == sorted(
        FILES.values()
    )


def _open_and_send(config: RunConfig, barrier: object, results: object, with_locks: bool) -> None:
    if not with_locks:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        cache_module.fcntl.flock = refuse  # type: ignore[attr-defined]
    barrier.wait()  # type: ignore[attr-defined]
    cache = open_cache(config)
    results.put((cache.facts.fingerprint, int(cache.tokens("train").sum())))  # type: ignore[attr-defined]


@pytest.mark.parametrize("with_locks", [True, False], ids=["with locks", "on a file system without locks"])
def test_processes_that_build_at_once_all_get_the_same_whole_cache(
    corpus: RunConfig, tmp_path: Path, with_locks: bool
) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_open_and_send, args=(corpus, barrier, results, with_locks)) for _ in range(4)]
    for process in processes:
        process.start()
    answers = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert len(answers) == 1
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_leftovers_of_killed_builders_are_cleared_after_a_day(corpus: RunConfig, tmp_path: Path) -> None:
    tokens = tmp_path / "cache" / "tokens"
    for name, age_seconds in (("old", 25 * 3600), ("young", 60)):
        folder = tokens / f".building-{name}"
        folder.mkdir(parents=True)
        changed = folder.stat().st_mtime - age_seconds
        os.utime(folder, (changed, changed))
    open_cache(corpus)
    assert {path.name for path in tokens.glob(".building-*")} == {".building-young"}


def test_a_document_that_changes_while_it_is_read_is_refused(
    corpus: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_split = cache_module.split_documents

    def split_then_edit(*values: Any) -> Any:
        found = find_split(*values)
        (tmp_path / "corpus" / "5.txt").write_text("something else", encoding="utf-8")
        return found

    monkeypatch.setattr(cache_module, "split_documents", split_then_edit)
    with pytest.raises(ConfigError, match="changed while it was being read"):
        open_cache(corpus)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_document_longer_than_a_piece_is_cached_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "PIECE_BYTES", 64)
    monkeypatch.setattr(cache_module, "_BATCH_BYTES", 100)
    files: dict[str, str | bytes] = {f"{index}.txt": f"line of {index}\n" * 40 for index in range(4)}
    write_files(tmp_path / "corpus", files)
    cache = open_cache(config_of(tmp_path / "corpus", tmp_path / "cache"))
    found = documents_of(cache.tokens("train")) + documents_of(cache.tokens("validation"))
    assert sorted(found) == sorted(files.values())


@pytest.mark.parametrize(("split", "fraction", "remedy"), [("train", 0.9, "lower"), ("validation", 0.05, "raise")])
def test_a_split_without_a_sample_is_refused_with_both_numbers(
    tmp_path: Path, split: str, fraction: float, remedy: str
) -> None:
    write_files(tmp_path / "corpus", {"a.txt": "line\n" * 30})
    config = config_of(tmp_path / "corpus", tmp_path / "cache", fraction=fraction)
    config = config.model_copy(update={"training": config.training.model_copy(update={"sequence_length": 32})})
    with pytest.raises(ConfigError) as caught:
        open_tokens(config, split)  # type: ignore[arg-type]
    (problem,) = caught.value.problems
    assert "33 tokens" in problem.message
    assert f"the {split} split has" in problem.message
    assert f"{remedy} data.validation_fraction" in problem.fix


def test_no_validation_is_an_empty_split(corpus: RunConfig, tmp_path: Path) -> None:
    dataset = open_tokens(config_of(tmp_path / "corpus", tmp_path / "cache", fraction=0.0), "validation")
    assert len(dataset) == 0
    assert len(validation_ids(dataset, 256)) == 0


def test_random_tokens_depend_on_seed_split_and_id_alone() -> None:
    config = data_config(source="synthetic", vocab_size=1000)
    train = open_tokens(config, "train")
    both = train.sample([5, 123_456])
    assert np.array_equal(both[1], open_tokens(config, "train").sample([123_456])[0])
    assert both.shape == (2, 9)
    assert 0 <= both.min() <= both.max() < 1000
    for other in (
        open_tokens(config, "validation"),
        open_tokens(data_config(source="synthetic", vocab_size=1000, training={"seed": 1}), "train"),
    ):
        assert not np.array_equal(other.sample([5]), both[:1])
