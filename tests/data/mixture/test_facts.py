"""Sources of a mixture whose samples mean different things are refused, and the way out that is named works."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.data.mixture.facts import Source, shared_facts
from ddpexp.errors import RefusedError
from ddpexp.run.prepare import prepare
from ddpexp.train.load_data import load_sets
from tests.refusals import is_about, refused

NAMES = ("cat", "dog", "fox", "owl", "a b", "10", "é", "x'y")


def source(name: str, options: Any = None, **facts: Any) -> Source:
    return Source(name, facts, options or {})


@pytest.mark.parametrize("cases", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_label_keeps_its_name_in_every_source(cases: int) -> None:
    chance = random.Random(cases)
    outcomes = set()
    for _ in range(cases):
        lists = [chance.sample(NAMES, chance.randint(2, 5)) for _ in range(chance.randint(2, 3))]
        if chance.random() < 0.5:
            lists[1:] = [lists[0][: chance.randint(2, 5)] for _ in lists[1:]]
        longest = max(lists, key=len)
        agree = all(names == longest[: len(names)] for names in lists)
        sources = [source(str(place), classes=names, num_classes=len(names)) for place, names in enumerate(lists)]
        facts = None
        with suppress(RefusedError):
            facts = shared_facts(sources)
        assert facts == ({"classes": longest, "num_classes": len(longest)} if agree else None), lists
        outcomes.add(agree)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (source("a", classes=["0", "1"]), source("b", classes=["cat", "dog"]), "data.sources.a: classes"),
        (
            source("a", columns=["x", "y"]),
            source("b", columns=["y", "x"]),
            "data.sources.a: give",
        ),
        (source("a", columns=["x", "y"]), source("b", columns=["x", "z"]), "data.sources.a: rename"),
        (
            source("a", target_columns=["p", "q"]),
            source("b", target_columns=["q", "p"]),
            "data.sources.a: give",
        ),
        (
            source("a", shape=[3, 8, 8]),
            source("b", {"channels": 1}, shape=[1, 8, 8]),
            "data.sources.a: shapes",
        ),
        (
            source("a", mean=[0.5], std=[0.1]),
            source("b", {"mean": None, "std": None}, mean=[0.5], std=[0.2]),
            "data.sources.a: normalized",
        ),
        (
            source("a", {"standardize": True}, mean=[1.0]),
            source("b", {"standardize": False}),
            "data.sources.a: normalize",
        ),
        (
            source("a", tokenizer={"kind": "char", "table": "ab"}, vocab_size=2),
            source("b", tokenizer={"kind": "char", "table": "bc"}, vocab_size=2),
            "data.sources.a: differently",
        ),
        (
            source("a", {"tokenizer": "x"}, vocab_size=9),
            source("b", {"tokenizer": "y"}, vocab_size=9),
            "data.sources.a: tokens",
        ),
    ],
)  # fmt: skip
def test_facts_that_one_model_cannot_learn_both_ways_are_refused(one: Source, other: Source, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        shared_facts([one, other])
    assert str(caught.value).startswith("data.sources.a and data.sources.b ")
    assert is_about(caught.value, message)


def test_facts_that_do_not_contradict_are_shared() -> None:
    library = {"kind": "tokenizers", "name": "t.json", "sha256": "1"}
    one = source("a", tokenizer={**library, "folder": "/one"}, vocab_size=9, target_columns=["price"], mean=None)
    other = source("b", tokenizer={**library, "folder": "/two"}, vocab_size=9, target_columns=["cost"])
    assert shared_facts([one, other]) == {"vocab_size": 9, "mean": None}
    assert shared_facts([one, source("c")]) == {"mean": None}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def tables(folder: Path) -> list[str]:
    for name, rows in (("one", ["cat", "dog"]), ("two", ["dog", "fox"])):
        (folder / f"{name}.csv").write_text(
            "x,y\n" + "".join(f"{place}.5,{row}\n" for place, row in enumerate(rows * 4))
        )
    return [
        f"data.sources.{name}.{key}" for name in ("one", "two") for key in (f"path={folder}/{name}.csv", "targets=y")
    ]


def images(folder: Path) -> list[str]:
    for name, classes in (("one", ["cat", "dog"]), ("two", ["dog", "fox"])):
        for number, one in enumerate(classes):
            for place in range(4):
                path = folder / name / "Train" / one / f"{place}.bmp"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (100 * number + 10 * place, 0, 0)).save(path)
    return [f"data.sources.{name}.{key}" for name in ("one", "two") for key in (f"root={folder}/{name}", "size=8")]


@pytest.mark.parametrize(("kind", "make"), [("arrays", tables), ("image_folder", images)])
def test_the_way_out_gives_every_source_the_same_numbers(kind: str, make: Any, folder: Path) -> None:
    words = ["recipe=mnist", "data=mixture", "trainer.global_batch_size=4", *make(folder)]
    words[2:2] = [f"+data@data.sources.{name}={kind}" for name in ("one", "two")]

    def experiment(*more: str) -> Any:
        composed = compose([*words, *more])
        assert composed is not None
        return parse(composed.values)

    wrong = experiment()
    with refused("data.sources.one") as caught:
        prepare(wrong.data, wrong.trust)
    right = experiment(*re.findall(r"data\.sources\.\w+\.classes=\[[^]]*\]", str(caught.value)))
    prepared = prepare(right.data, right.trust)
    assert prepared is not None
    assert prepared["facts"]["classes"] == ["cat", "dog", "fox"]
    _, labels = load_sets(right, prepared).train.gather(torch.arange(16), torch.device("cpu"))
    expected = [0, 1] * 4 + [1, 2] * 4 if kind == "arrays" else [0] * 4 + [1] * 8 + [2] * 4
    assert labels.tolist() == expected
