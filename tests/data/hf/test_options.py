"""Options of `data=hf` that are wrong, which needs no library to see."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddpexp.data.hf.prepare import prepare
from ddpexp.errors import RefusedError

COLUMNS = {"inputs": "a", "targets": "b"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": None}, "data.path is not set: name a file"),
        ({"inputs": None}, "data.inputs is not set: name the columns of data.path=t.csv"),
        ({"targets": None}, "data.targets is not set: name the columns of data.path=t.csv"),
        ({"target_type": "none"}, "data.target_type=none is for data without targets"),
        ({"path": "./nowhere"}, "data.path=./nowhere does not exist"),
        ({"path": "*.json"}, "data.path=*.json holds no files"),
        ({"path": "empty.csv"}, "data.path=empty.csv is empty"),
        ({"eval_path": "e.csv"}, "data.eval_path=e.csv does not exist"),
        ({"image_size": 0}, "data.image_size=0: use 1 to 4096 pixels"),
        ({"channels": 2}, "data.channels=2: use 3 for RGB or 1 for grey."),
        ({"max_length": 0}, "data.max_length=0 is too short"),
        ({"tokenizer": "char"}, "data.tokenizer=char makes its table from a text"),
        ({}, "data=hf needs the library datasets: pip install 'ddpexp[hf]'."),
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
    with pytest.raises(RefusedError, match=f"^{re.escape(sentence)}"):
        prepare(**{"path": "t.csv", **COLUMNS, **options})
