from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.config.schema import DataConfig
from orchestrator.data import corpora
from orchestrator.data.corpora import line_start_before, list_documents, read_pieces
from orchestrator.data.split import split_documents
from orchestrator.errors import ConfigError
from tests.core.data_configs import write_files


def names(data: DataConfig) -> list[str]:
    return [document.name for document in list_documents(data).documents]


def test_the_default_corpus_is_the_source_of_this_pythons_library_and_nothing_else() -> None:
    listing = list_documents(DataConfig())
    found = {document.name for document in listing.documents}
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py", "typing.py"} <= found
    assert all(name.endswith(".py") for name in found)
    for unwanted in ("site-packages", "dist-packages", "__pycache__", "/test/", "/tests/", "_sysconfigdata"):
        assert not [name for name in found if unwanted in f"/{name}"]
    assert 5e6 < listing.size_bytes < 50e6
    assert f"{len(found):,} documents" in listing.describe()
    assert f"{listing.size_bytes:,} bytes" in listing.describe()


def test_the_default_corpus_holds_only_text() -> None:
    parts, skipped = split_documents(list_documents(DataConfig()), 0.05)
    assert len(parts["train"]) > 10 * len(parts["validation"]) > 0
    assert len(skipped) < 5


def test_a_folder_is_every_file_below_it_by_name_but_hidden_and_empty_ones(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.txt": "b", "a/z.md": "z", "a/y": "y", ".git/x": "x", "a/.hidden": "h", "empty.txt": ""})
    assert names(DataConfig(source="text", path=str(tmp_path))) == ["a/y", "a/z.md", "b.txt"]


def test_a_linked_folder_is_read_once_even_when_links_go_in_circles(tmp_path: Path) -> None:
    write_files(tmp_path, {"corpus/a.txt": "a", "elsewhere/b.txt": "b"})
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "corpus")
    assert names(DataConfig(source="text", path=str(tmp_path / "corpus"))) == ["a.txt", "linked/b.txt"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", ["c.txt"]),
        ("**/*.txt", ["a/b/d.txt", "a/e.txt", "c.txt"]),
        ("a/*", ["e.txt", "f.md"]),
        ("c.txt", ["c.txt"]),
    ],
)
def test_a_glob_chooses_files_and_names_them_from_its_fixed_part(
    tmp_path: Path, pattern: str, found: list[str]
) -> None:
    write_files(tmp_path, {"a/b/d.txt": "d", "a/e.txt": "e", "a/f.md": "f", "c.txt": "c"})
    assert names(DataConfig(source="text", path=str(tmp_path / pattern))) == found


def test_a_path_with_brackets_that_exists_is_that_path(tmp_path: Path) -> None:
    write_files(tmp_path, {"notes [1]/a.txt": "a"})
    assert names(DataConfig(source="text", path=str(tmp_path / "notes [1]"))) == ["a.txt"]


@pytest.mark.parametrize(
    ("content", "byte", "reason"),
    [
        (b"good \xff bad", 5, "0xff"),
        ("gr\u00fc\u00dfe".encode("latin-1"), 2, "0xfc"),
        (b"abc\x00def", 3, "0x00"),
        ("text".encode("utf-16-le"), 1, "UTF-16"),
        ("caf\u00e9".encode()[:-1], 3, "unexpected end"),
    ],
)
def test_what_is_not_utf8_is_refused_with_its_file_and_byte(
    tmp_path: Path, content: bytes, byte: int, reason: str
) -> None:
    write_files(tmp_path, {"good.txt": "good", "bad.txt": content})
    listing = list_documents(DataConfig(source="text", path=str(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        split_documents(listing, 0.05)
    (problem,) = caught.value.problems
    assert problem.key == "data.path"
    for part in (str(tmp_path / "bad.txt"), f"byte {byte} ", reason):
        assert part in problem.message
    assert "iconv" in problem.fix


SMALL_PIECES = 16


@given(text=st.text(max_size=200), start=st.integers(0, 50), length=st.integers(0, 200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_are_the_text_bounded_and_cut_behind_lines_or_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, start: int, length: int
) -> None:
    monkeypatch.setattr(corpora, "PIECE_BYTES", SMALL_PIECES)
    text = text.replace("\0", "\n")
    content = ("\n" * start + text).encode()
    write_files(tmp_path, {"a.txt": content + b"x"})
    (document,) = list_documents(DataConfig(source="text", path=str(tmp_path))).documents
    pieces = list(read_pieces(document, start, len(content)))
    assert b"".join(pieces) == text.encode()
    assert all(0 < len(piece) < 2 * SMALL_PIECES for piece in pieces)
    for piece in pieces[:-1]:
        piece.decode()
        assert piece.endswith(b"\n") or b"\n" not in piece
    offset = min(length, len(content))
    cut = line_start_before(document, offset)
    assert cut <= offset
    assert content[:cut].endswith(b"\n") or b"\n" not in content[:offset]
    content[:cut].decode()


@pytest.mark.parametrize("offset", [0, 15, 16, 17, 31, 40, 99])
@pytest.mark.parametrize("bad", [b"\xff", b"\x00", b"\xc3\n"])
def test_the_byte_that_is_not_text_is_counted_from_the_files_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, bad: bytes
) -> None:
    monkeypatch.setattr(corpora, "PIECE_BYTES", SMALL_PIECES)
    content = (b"lines of text\n" * 10)[:offset] + bad + b"and more text\n" * 5
    write_files(tmp_path, {"a.txt": content})
    (document,) = list_documents(DataConfig(source="text", path=str(tmp_path))).documents
    with pytest.raises(corpora.NotTextError, match=f"byte {offset} is"):
        list(read_pieces(document))


def test_many_files_that_are_not_text_are_counted_not_listed(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{index:02}.bin": b"\xff" for index in range(30)})
    with pytest.raises(ConfigError) as caught:
        split_documents(list_documents(DataConfig(source="text", path=str(tmp_path))), 0.05)
    assert len(caught.value.problems) == 6
    assert "25 more files" in str(caught.value)


def test_a_missing_path_is_refused_with_the_part_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        list_documents(DataConfig(source="text", path=str(tmp_path / "no" / "such")))
    assert f"({tmp_path} does)" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "a"})
    (tmp_path / "a.txt").chmod(0)
    (document,) = list_documents(DataConfig(source="text", path=str(tmp_path))).documents
    with pytest.raises(ConfigError, match="Permission denied"):
        list(read_pieces(document))


def test_the_split_of_a_document_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    files = {f"{index}.txt": f"text {index}\n" for index in range(200)}
    write_files(tmp_path, files)
    data = DataConfig(source="text", path=str(tmp_path))

    def held_out() -> set[str]:
        return {part.document.name for part in split_documents(list_documents(data), 0.2)[0]["validation"]}

    before = held_out()
    assert 20 < len(before) < 60
    write_files(tmp_path, {"000 first.txt": "new", "zzz last.txt": "new"})
    assert held_out() - {"000 first.txt", "zzz last.txt"} == before


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.5, 0.999999])
def test_two_documents_always_give_one_to_each_split(tmp_path: Path, fraction: float) -> None:
    write_files(tmp_path, {"a.txt": "a", "b.txt": "b"})
    parts, _ = split_documents(list_documents(DataConfig(source="text", path=str(tmp_path))), fraction)
    assert [len(parts["train"]), len(parts["validation"])] == [1, 1]


def test_without_a_validation_fraction_everything_is_for_training(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "a", "b.txt": "b"})
    parts, _ = split_documents(list_documents(DataConfig(source="text", path=str(tmp_path))), 0.0)
    assert [len(parts["train"]), len(parts["validation"])] == [2, 0]


@pytest.mark.parametrize(
    ("text", "train", "validation"),
    [
        ("one\ntwo\nthree\nfour\n", "one\ntwo\n", "three\nfour\n"),
        ("no line end at all", "no line e", "nd at all"),
        ("\u00e9" * 5, "\u00e9" * 2, "\u00e9" * 3),
    ],
)
def test_a_single_document_is_cut_behind_a_line_and_never_inside_a_character(
    tmp_path: Path, text: str, train: str, validation: str
) -> None:
    write_files(tmp_path, {"only.txt": text})
    parts, _ = split_documents(list_documents(DataConfig(source="text", path=str(tmp_path / "only.txt"))), 0.5)
    cut = {split: "".join(text.encode()[part.start : part.end].decode() for part in parts[split]) for split in parts}
    assert cut == {"train": train, "validation": validation}


def test_no_part_of_the_data_room_needs_torch_or_ray() -> None:
    import orchestrator.data.baseline
    import orchestrator.data.check
    import orchestrator.data.order  # noqa: F401

    loaded = {name for name in sys.modules if name.startswith("orchestrator.data")}
    for name in loaded:
        assert not {"torch", "ray"} & set(vars(sys.modules[name]))
