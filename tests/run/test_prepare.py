"""The preparation of data by a function of the user's, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.config.compose import compose
from ddpexp.config.instantiate import Trust
from ddpexp.config.parse import parse
from ddpexp.doctor import storage
from ddpexp.doctor.setting import Setting
from ddpexp.run.prepare import check_paths, prepare, prepare_to_evaluate, prepare_to_predict, prepare_to_resume
from ddpexp.settings.data import Data
from tests.refusals import refused


def test_the_options_may_have_any_size(tmp_path: Path) -> None:
    (tmp_path / "of_columns.py").write_text("def prepare(names):\n    return {'name': names[-1], 'num': len(names)}\n")
    composed = compose(["recipe=mnist"])
    assert composed is not None
    options = {"names": [f"column {number}" for number in range(100_000)]}
    data = replace(parse(composed.values).data, prepare="of_columns.prepare", options=options)
    assert prepare(data, Trust(("of_columns",), tmp_path)) == {"name": "column 99999", "num": 100_000}


TRUST = Trust((), Path())
AGAIN = [prepare_to_resume, prepare_to_evaluate, prepare_to_predict]


def section(*overrides: str) -> Data:
    composed = compose(["recipe=mnist", *overrides])
    assert composed is not None
    return parse(composed.values).data


def texts(folder: Path) -> tuple[Data, Data]:
    """Return a text, and another with as many characters, of which a table of its own would number two otherwise."""
    (folder / "a.txt").write_text("abcd " * 20)
    (folder / "b.txt").write_text("abc " * 20)
    one, other = (section("recipe=gpt", f"data.path={folder}/{name}.txt", "data.block_size=4") for name in "ab")
    return one, other


def photographs(folder: Path) -> tuple[Data, Data]:
    """Return a folder of two classes, and one with the second of them alone and another."""
    for name, classes in {"one": ("cat", "dog"), "other": ("dog", "emu")}.items():
        for label in classes:
            (folder / name / label).mkdir(parents=True)
            (folder / name / label / "0.pbm").write_bytes(b"P4\n1 1\n\0")
    one, other = (
        section("data=image_folder", f"data.root={folder}/{name}", "data.size=8") for name in ("one", "other")
    )
    return one, other


@pytest.mark.parametrize("again", AGAIN)
def test_a_text_is_read_by_the_vocabulary_of_the_run(tmp_path: Path, again: Callable[..., Any]) -> None:
    one, other = texts(tmp_path)
    trained = prepare(one, TRUST)
    assert trained is not None
    assert again(one, TRUST, trained, False) == trained
    assert again(other, TRUST, trained, False)["facts"]["tokenizer"] == trained["facts"]["tokenizer"]


@pytest.mark.parametrize("again", AGAIN)
def test_sources_of_a_mixture_are_read_by_their_own_schemas(tmp_path: Path, again: Callable[..., Any]) -> None:
    one, other = texts(tmp_path)
    mixture = replace(one, prepare=None, options={}, sources={"left": one, "right": one})
    trained = prepare(mixture, TRUST)
    assert trained is not None
    found = again(replace(mixture, sources={"left": one, "right": other}), TRUST, trained, False)
    assert {name: source["facts"]["tokenizer"] for name, source in found["sources"].items()} == dict.fromkeys(
        ("left", "right"), trained["sources"]["left"]["facts"]["tokenizer"]
    )


@pytest.mark.parametrize("again", AGAIN)
def test_photographs_have_the_classes_of_the_run(tmp_path: Path, again: Callable[..., Any]) -> None:
    one, other = photographs(tmp_path)
    trained = prepare(one, TRUST)
    assert trained is not None
    assert again(one, TRUST, trained, False) == trained
    with refused("folders"):
        again(other, TRUST, trained, False)


def test_data_of_another_kind_is_read_by_a_schema_of_its_own(tmp_path: Path) -> None:
    trained = prepare(texts(tmp_path)[0], TRUST)
    assert trained is not None
    found = prepare_to_evaluate(photographs(tmp_path)[0], TRUST, trained, False)
    assert found is not None
    assert found["facts"]["classes"] == ["cat", "dog"]


_MIXED = ("data=mixture", "+data@data.sources.a=mnist", "+data@data.sources.b=mnist", "data.sources.b.source=embedded")


@pytest.mark.parametrize(
    "words",
    [
        ("data.root=nowhere",),
        ("data.root=nowhere", "data.source=embedded"),
        ("recipe=cifar10", "data.root=nowhere"),
        ("data=images", "data.root=nowhere"),
        ("recipe=imagenet", "data.root=nowhere"),
        ("recipe=tabular", "data.path=nowhere.csv", "data.targets=y"),
        ("recipe=tabular", "data.path={here}/there.csv", "data.targets=y", "data.eval_path=nowhere.csv"),
        ("recipe=gpt", "data.path=nowhere.txt"),
        ("recipe=gpt", "data.path=[{here}/there.csv,nowhere.txt]"),
        ("recipe=gpt", "data.path=nowhere/*.txt"),
        ("recipe=gpt", "data.path={here}/there.csv", "data.eval_path=nowhere"),
        (*_MIXED, "data.sources.a.root=nowhere"),
    ],
)
def test_a_path_that_is_not_there_is_refused_by_its_key(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "there.csv").write_text("x,y\n1,2\n" * 40)
    data = section(*(word.replace("{here}", str(tmp_path)) for word in words))
    key = next(word for word in words if word.endswith(("nowhere", "nowhere.csv", "nowhere.txt]", ".txt")))
    with refused(key.partition("=")[0]):
        prepare(data, TRUST)
    with refused(f"{key.partition('=')[0]}: exist"):
        check_paths(data)
    [found] = storage.judge_data(storage.gather_data(data), Setting("outputs"))
    assert (found.level, found.text.partition("=")[0]) == ("bad", key.partition("=")[0])


def test_a_folder_to_download_to_need_not_be_there_yet() -> None:
    check_paths(section("data.root=nowhere", "data.source=download"))
