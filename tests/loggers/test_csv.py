"""Tables of scalars, and that each row stands in them once."""

from __future__ import annotations

import csv
from pathlib import Path

from ddpexp.loggers.csv_files import CsvFiles


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_kind_of_record_has_a_file_with_its_columns(tmp_path: Path) -> None:
    logger = CsvFiles(tmp_path)
    logger.scalars(10, 0.5, {"train/loss": 1.5, "train/lr": 0.1})
    logger.scalars(10, 0.5, {"eval/loss": 1.0, "extra/loss": 2.0})
    logger.scalars(20, 1.0, {"train/lr": 0.2, "train/loss": float("nan")})
    logger.close()
    assert rows(tmp_path / "csv/train.csv") == [
        {"step": "10", "epoch": "0.5000", "train/loss": "1.5", "train/lr": "0.1"},
        {"step": "20", "epoch": "1.0000", "train/loss": "nan", "train/lr": "0.2"},
    ]
    assert [row["eval/loss"] for row in rows(tmp_path / "csv/eval.csv")] == ["1.0"]
    assert [row["extra/loss"] for row in rows(tmp_path / "csv/extra.csv")] == ["2.0"]


def test_a_resumed_run_continues_its_files_at_the_checkpoint(tmp_path: Path) -> None:
    first = CsvFiles(tmp_path)
    first.scalars(10, 0.5, {"train/loss": 1.0})
    position = first.position()
    first.scalars(20, 1.0, {"train/loss": 2.0})
    first.scalars(20, 1.0, {"eval/loss": 2.0})
    second = CsvFiles(tmp_path)
    second.truncate(position, 10)
    assert not (tmp_path / "csv/eval.csv").exists()
    second.scalars(20, 1.0, {"train/loss": 3.0})
    assert second.position() == {"csv/train.csv": (tmp_path / "csv/train.csv").stat().st_size}
    assert [(row["step"], row["train/loss"]) for row in rows(tmp_path / "csv/train.csv")] == [
        ("10", "1.0"),
        ("20", "3.0"),
    ]


def test_other_columns_after_a_change_begin_another_file(tmp_path: Path) -> None:
    CsvFiles(tmp_path).scalars(10, 0.5, {"train/loss": 1.0})
    logger = CsvFiles(tmp_path)
    for step in (20, 30):
        logger.scalars(step, 1.0, {"train/loss": 2.0, "train/f1": 0.5})
    assert [row["step"] for row in rows(tmp_path / "csv/train.csv")] == ["10"]
    assert [row["step"] for row in rows(tmp_path / "csv/train-2.csv")] == ["20", "30"]
