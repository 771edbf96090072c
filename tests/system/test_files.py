"""The writers: what each makes of a secret."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import yaml

from ddpexp.system import files
from ddpexp.system.secrets import Masked

VALUE = "q5zk-'7 \u00e4\"wyx"


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPEXP_SECRETS", "MINE,PIN")
    monkeypatch.setenv("MINE", VALUE)
    monkeypatch.setenv("PIN", "4711")


def test_each_writer_masks_and_leaves_numbers_alone(tmp_path: Path) -> None:
    path, tree = tmp_path / "file", {f"a {VALUE}": [VALUE, {"b": f"x{VALUE}", "c": math.nan}], "pin": 4711}
    masked = {"a ${MINE}": ["${MINE}", {"b": "x${MINE}", "c": None}], "pin": 4711}
    files.write_json(path, tree)
    assert json.loads(path.read_text()) == masked
    assert path.stat().st_mode & 0o777 == 0o644
    files.write(path, files.dumps(tree))
    assert json.loads(path.read_text()) == masked, "JSON is not masked a second time, as a text"
    files.write_yaml(path, {**tree, f"a {VALUE}": [VALUE]})
    assert yaml.safe_load(path.read_text()) == {"a ${MINE}": ["${MINE}"], "pin": 4711}
    files.write(path, f"a {VALUE} {os.fsdecode(bytes([255]))}, 4711")
    assert path.read_bytes() == b"a ${MINE} \xff, ${PIN}"
    assert json.loads(files.json_line([VALUE, 4711])) == ["${MINE}", 4711]
    files.write(path, Masked(VALUE))
    assert path.read_text() == VALUE
    assert files.back_up(path) == tmp_path / "file-1"
    assert (tmp_path / "file-1").read_text() == "${MINE}"
    assert sorted(os.listdir(tmp_path)) == ["file", "file-1"]


def test_a_file_that_grows_masks_each_text(tmp_path: Path) -> None:
    with files.open_to_append(tmp_path / "log") as log:
        assert log.write(f"a {VALUE}\n") == len(VALUE) + 3
        print("and", VALUE, file=log)
    assert (tmp_path / "log").read_text() == "a ${MINE}\nand ${MINE}\n"
    (tmp_path / "link").symlink_to(tmp_path / "log")
    with pytest.raises(OSError, match="symbolic links"):
        files.open_to_append(tmp_path / "link")


def test_an_answer_to_another_process_is_as_it_is(tmp_path: Path) -> None:
    files.answer(tmp_path / "answer", {"path": VALUE})
    assert json.loads((tmp_path / "answer").read_text()) == {"path": VALUE}
