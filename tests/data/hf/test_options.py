"""Options of `data=hf` that are wrong, which needs no library to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpexp.data.hf.prepare import prepare
from tests.refusals import refused

COLUMNS = {"inputs": "a", "targets": "b"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": None}, "data.path"),
        ({"inputs": None}, "data.inputs"),
        ({"targets": None}, "data.targets"),
        ({"target_type": "none"}, "data.target_type=none"),
        ({"path": "./nowhere"}, "data.path=./nowhere"),
        ({"path": "*.json"}, "data.path=*.json"),
        ({"path": "empty.csv"}, "data.path=empty.csv"),
        ({"eval_path": "e.csv"}, "data.eval_path=e.csv"),
        ({"tokenizer": "char"}, "data.tokenizer=char"),
        ({}, "data=hf"),
    ],
)
def test_options_that_are_wrong_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ddpexp.data.hf.prepare._MODULE", "no_library_of_this_name")
    Path("t.csv").write_text("a,b\n1,2\n")
    Path("empty.csv").touch()
    with refused(sentence):
        prepare(**{"path": "t.csv", **COLUMNS, **options})
