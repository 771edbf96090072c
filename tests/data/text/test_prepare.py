"""Text to tokens: what is encoded, what is cached, and what is said where a file or an option is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpexp.data.text.prepare import BORDERS, TOKENS, prepare
from ddpexp.data.text.tokenizer import Bytes, Chars, from_record
from ddpexp.errors import RefusedError
from tests.refusals import is_about, refused

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n" * 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text" / "a.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


def prepared(path: Path | str, **options: Any) -> dict[str, Any]:
    return prepare(str(path), **{"block_size": 8, **options})


def tokens(found: dict[str, Any]) -> list[int]:
    values: list[int] = np.fromfile(Path(found["folder"], TOKENS), f"<u{found['token_bytes']}").tolist()
    return values


def test_characters_are_numbered_in_their_order(file: Path) -> None:
    found = prepared(file)
    table = sorted(set(TEXT))
    assert tokens(found) == [table.index(character) for character in TEXT]
    assert (found["facts"]["vocab_size"], found["facts"]["block_size"]) == (len(table), 8)
    assert (found["num_train"], found["num_test"]) == (int(len(TEXT) * 0.9), len(TEXT) - int(len(TEXT) * 0.9))
    tokenizer = from_record(json.loads(json.dumps(found["facts"]["tokenizer"])))
    assert tokenizer.decode(tokenizer.encode("Deich")) == "Deich"


def test_a_table_is_stored_in_ascii_that_a_configuration_leaves_alone() -> None:
    table = "".join(sorted("\n\t${x}\\'\"\u2028é😀"))
    record = Chars(table).record
    assert from_record(record) == Chars(table)
    assert record["table"].isascii()
    assert "$" not in record["table"]


def test_more_than_256_characters_take_two_bytes(file: Path) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 300))) * 2
    file.write_text(text)
    found = prepared(file)
    assert found["token_bytes"] == 2
    assert tokens(found) == [ord(character) - 0x4E00 for character in text]


def test_a_table_longer_than_where_surrogates_begin_is_encoded() -> None:
    table = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10800)]))
    [packed] = Chars(table).pack([table])
    assert np.frombuffer(packed, "<u2").tolist() == list(range(len(table)))
    assert Chars(table).encode(table[-3:]) == [len(table) - 3, len(table) - 2, len(table) - 1]


def test_bytes_are_those_of_the_file(file: Path) -> None:
    content = bytes(range(256)) * 2
    file.write_bytes(content)
    found = prepared(file, tokenizer="bytes")
    assert bytes(tokens(found)) == content
    assert found["facts"]["vocab_size"] == 256
    assert Bytes().decode(Bytes().encode("größer")) == "größer"


@pytest.mark.parametrize("documents", [None, "file", "line"])
def test_a_byte_order_mark_at_the_begin_of_a_file_is_no_token(file: Path, documents: Any) -> None:
    expected = tokens(prepared(file, documents=documents, eval_path=str(file)))
    file.write_text(TEXT, encoding="utf-8-sig")
    found = prepared(file, documents=documents, eval_path=str(file))
    assert tokens(found) == expected
    assert "\ufeff" not in found["facts"]["tokenizer"]["table"]
    file.write_text("\ufeff", encoding="utf-8")
    with refused("data.block_size=8"):
        prepared(file)


def test_a_text_is_encoded_once(file: Path) -> None:
    found = prepared(file)
    made = os.stat(Path(found["folder"], TOKENS)).st_ino
    assert prepared(file) == found
    assert prepared(file, block_size=16)["folder"] == found["folder"]
    assert os.stat(Path(found["folder"], TOKENS)).st_ino == made


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"eval_fraction": 0.2}, {"block_size": 9}])
def test_other_options_are_other_data(file: Path, options: dict[str, Any]) -> None:
    assert prepared(file)["hash"] != prepared(file, **options)["hash"]


def test_another_text_at_the_same_path_is_encoded_again(file: Path) -> None:
    before = prepared(file)
    file.write_text(TEXT.upper())
    after = prepared(file)
    assert after["folder"] != before["folder"]
    assert after["hash"] != before["hash"]


def test_folders_patterns_and_lists_are_read_in_the_order_of_their_names(file: Path) -> None:
    (file.parent / "b").mkdir()
    (file.parent / "b" / "c.txt").write_text("x" * 20)
    (file.parent / "other.md").write_text("y")
    whole = TEXT + "x" * 20
    for path in (file.parent, file.parent / "**" / "*.txt"):
        assert bytes(tokens(prepared(path, tokenizer="bytes"))) == whole.encode()
    turned = prepare((str(file.parent / "b"), str(file)), 8, "bytes")
    assert bytes(tokens(turned)) == ("x" * 20 + TEXT).encode()


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "Valid.txt"),
        ("wiki.train.txt", "wiki.test.txt"),
        ("Train/a.txt", "test/b.txt"),
    ],
)
def test_a_folder_with_several_parts_is_refused(names: tuple[str, str], file: Path) -> None:
    folder = file.parent / "parts"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TEXT)
    with refused("data.path"):
        prepared(folder)


@pytest.mark.parametrize(
    "names", [("test1.txt", "test2.txt"), ("train station.txt", "test tube.txt"), ("x.txt", "y/z.txt")]
)
def test_texts_of_one_part_are_read(names: tuple[str, str], file: Path) -> None:
    for name in names:
        (file.parent / "parts" / name).parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "parts" / name).write_text(TEXT)
    assert prepared(file.parent / "parts")["num_train"] == int(2 * len(TEXT) * 0.9)


def test_files_to_evaluate_on_among_those_to_train_on_are_counted(file: Path) -> None:
    (file.parent / "b.txt").write_text(TEXT)
    found = prepared(file.parent, eval_path=str(file.parent / "b.txt"))
    assert found["note"].endswith(f"; 1 file of data.eval_path, such as {file.parent}/b.txt, trained on too")
    assert "trained on" not in prepared(file, eval_path=str(file.parent / "b.txt"))["note"]


def test_own_files_are_evaluated_in_place_of_the_end(file: Path) -> None:
    other = file.parent / "eval.text"
    other.write_text("other words than those before")
    found = prepared(file, eval_path=str(other))
    assert (found["num_train"], found["num_test"]) == (len(TEXT), 29)
    assert found["facts"]["vocab_size"] == len(set(TEXT) | set(other.read_text()))


def test_the_border_lies_at_the_end_of_a_document(file: Path) -> None:
    file.write_text("one line\n\n" * 9 + "the last one, without an end")
    found = prepared(file, tokenizer="bytes", documents="line", eval_fraction=0.4)
    assert bytes(tokens(found)) == b"one line\n" * 9 + b"the last one, without an end"
    assert np.fromfile(Path(found["folder"], BORDERS), "<i8").tolist() == [*range(9, 82, 9), 109]
    assert found["num_train"] == 63  # 7 documents, of 109 * 0.6 = 65 tokens


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eval_fraction": 0.995}, "data.block_size=8"),
        ({"block_size": 300}, "data.block_size=300"),
        ({"block_size": 30}, "data.block_size=30"),
        ({"tokenizer": "chars"}, "data.tokenizer=chars"),
        ({"tokenizer": "none.json"}, "data.tokenizer=none.json"),
        ({"end_token": "<|endoftext|>"}, "data.end_token=<|endoftext|>: documents"),
        (
            {"end_token": "<|endoftext|>", "documents": "line"},
            "data.end_token=<|endoftext|>: char",
        ),
        ({"eval_path": "nothing.txt"}, "data.eval_path"),
    ],
)
def test_an_invalid_option_is_refused_in_one_sentence(file: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        prepared(file, **options)
    assert is_about(caught.value, text)


def test_files_that_cannot_be_read_are_refused(file: Path) -> None:
    empty, folder, binary = file.parent / "empty.txt", file.parent / "folder", file.parent / "binary"
    empty.touch()
    folder.mkdir()
    binary.write_bytes(b"abc\xff" * 20)
    for path, text in (
        (None, "data.path"),
        (str(empty), f"data.path={empty}"),
        (str(folder), f"data.path={folder}"),
        (f"{folder}/*.md", f"data.path={folder}/*.md"),
        (str(binary), f"{binary}: at byte 3"),
    ):
        with refused(text):
            prepare(path, 8)


def test_a_prompt_with_an_unknown_character_is_refused() -> None:
    with refused("among"):
        Chars("abc").encode("aß")


def test_a_tokenizer_of_the_library(file: Path) -> None:
    library = pytest.importorskip("tokenizers")
    model = library.models.WordLevel({"[UNK]": 0, "jagen": 1, "Deich": 2, "<|end|>": 3}, unk_token="[UNK]")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    path = file.parent / "tokenizer.json"
    tokenizer.save(str(path))
    found = prepared(file, tokenizer=str(path), documents="line", end_token="<|end|>")
    assert tokens(found) == [0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0, 3] * 4
    assert found["facts"]["vocab_size"] == 4
    folder = Path(found["folder"])
    path.unlink()  # the cache has a copy
    assert from_record(found["facts"]["tokenizer"]).decode([1, 2]) == "jagen Deich"
    (folder / "tokenizer.json").write_text(tokenizer.to_str().replace("jagen", "fangen"))
    with refused("tokenizer.json: of the run"):
        from_record(found["facts"]["tokenizer"])
    path.write_text("{}")
    with refused(f"data.tokenizer={path}: library tokenizers"):
        prepared(file, tokenizer=str(path))


def test_another_text_is_encoded_by_the_vocabulary_of_the_run(file: Path) -> None:
    trained = prepared(file)
    other = file.with_name("b.txt")
    other.write_text("Der Sylter Boxkampf im Deich " * 4)  # other characters: a table of its own numbers them otherwise
    table = sorted(set(TEXT))
    found = prepared(other, schema=trained["schema"])
    assert tokens(found) == [table.index(character) for character in other.read_text()]
    assert found["schema"]["vocabulary"] == trained["schema"]["vocabulary"] != prepared(other)["schema"]["vocabulary"]
    assert prepared(file, schema=trained["schema"]) == trained


@pytest.mark.parametrize("documents", [None, "line"])
def test_a_character_that_the_run_does_not_know_is_named_with_its_place(file: Path, documents: Any) -> None:
    schema = prepared(file)["schema"]
    other = file.with_name("b.txt")
    other.write_text("Deich Deich\nDeich & Deich %\n")
    with pytest.raises(RefusedError) as caught:
        prepared(other, documents=documents, schema=schema)
    assert is_about(caught.value, "b.txt")
