"""metrics.jsonl: whole lines of JSON that any program can read, at any moment."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ddpexp.loggers.jsonl import JsonLines


def test_each_record_is_one_line_of_json_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.scalars(5, 1.23456, {"train/loss": 0.5, "train/lr": 1e-9})
    [record] = [json.loads(line) for line in path.read_text().splitlines()]  # before any flush
    assert abs(record.pop("time") - path.stat().st_mtime) < 60
    assert record == {"step": 5, "epoch": 1.2346, "train/loss": 0.5, "train/lr": 1e-9}
    lines.text("config", "not for this file")
    lines.hyperparameters({"lr": 1})
    lines.done()
    lines.close()
    assert len(path.read_text().splitlines()) == 1


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.scalars(1, 0.1, {"nan": math.nan, "inf": math.inf, "one": 1.0})
    lines.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    record = json.loads(text)
    assert (record["nan"], record["inf"], record["one"]) == (None, None, 1.0)


def test_an_older_file_is_continued(tmp_path: Path) -> None:
    for step in (1, 2):
        lines = JsonLines(tmp_path / "metrics.jsonl")
        lines.scalars(step, 0.0, {"a": 1.0})
        lines.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
