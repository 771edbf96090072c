"""Pictures from event files of any kind."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from ddpexp.report.pictures import Picture, read_pictures, within
from tests.report.made import png, write_events


def test_pictures_are_found_by_name_and_step(tmp_path: Path) -> None:
    write_events(tmp_path, [("a", 2, png(2)), ("b", 1, png(3)), ("a", 1, png(1)), ("a", 2, png(9))])
    found = read_pictures(tmp_path)
    assert found == {"a": [Picture("a", 1, png(1)), Picture("a", 2, png(9))], "b": [Picture("b", 1, png(3))]}
    assert found["b"][0].address.startswith("data:image/png;base64,iVBOR")


def test_of_many_steps_a_dozen_are_shown(tmp_path: Path) -> None:
    write_events(tmp_path, [("samples", step, png()) for step in range(1, 31)])
    [samples] = read_pictures(tmp_path).values()
    assert len(samples) == 12
    assert (samples[0].step, samples[-1].step) == (1, 30)


def test_what_is_no_drawable_picture_is_left_out(tmp_path: Path) -> None:
    bomb = png()[:16] + struct.pack(">II", 100_000, 100_000) + png()[24:]
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"
    write_events(tmp_path, [("a", 1, bomb), ("b", 1, svg), ("c", 1, png()[:10]), ("d", -5, png()), ("e", 1, png())])
    assert set(read_pictures(tmp_path)) == {"e"}


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 1 << 40, (1 << 64) - 1])
def test_a_damaged_file_ends_nothing(tmp_path: Path, size: int) -> None:
    path = write_events(tmp_path, [("a", 1, png())])
    whole = path.read_bytes()
    path.write_bytes(struct.pack("<QI", size, 0) + whole)
    read_pictures(tmp_path)
    path.write_bytes(whole + struct.pack("<QI", size, 0) + png())
    assert set(read_pictures(tmp_path)) == {"a"}
    path.write_bytes(whole[:-30])
    assert read_pictures(tmp_path) == {}
    path.unlink()
    os.mkfifo(path)
    assert read_pictures(tmp_path) == {}
    assert read_pictures(tmp_path / "none") == {}


def test_the_newest_pictures_of_all_runs_have_room_before_older_ones() -> None:
    runs = [
        {"a": [Picture("a", step, b"x" * 10) for step in (1, 2, 3)], "b": [Picture("b", 9, b"x" * 5)]} for _ in "12"
    ]
    assert within(runs, 1000) == runs
    found = within(runs, 40)
    assert [[picture.step for picture in run["a"]] for run in found] == [[1, 3], [3]]
    assert [len(run["b"]) for run in found] == [1, 1]
    assert within(runs, 0) == [{}, {}]
