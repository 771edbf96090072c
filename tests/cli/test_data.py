"""`ddpexp data`: what the data is, and a sheet of what the model will see."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddpexp.cli.data import data
from ddpexp.cli.preview import pixels, sheet, texts
from examples.photos.draw import main as draw_photos
from tests.conftest import ROOT
from tests.refusals import refused
from tests.typed import call


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--preview", "a.jpg"], "--preview a.jpg: PNG"),
        (["--preview", "recipe=mnist"], "--preview recipe=mnist: PNG"),
        (["--preview"], "data --preview: one value"),
    ],
)
def test_a_preview_is_a_picture(words: list[str], expected: str) -> None:
    with refused(expected):
        data(call("data", *words))


def test_data_is_described_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    draw_photos(tmp_path / "photos")
    typed = ["--config-dir", str(ROOT / "examples/photos/conf"), "recipe=photos", f"data.root={tmp_path / 'photos'}"]
    assert data(call("data", *typed, "--preview", str(tmp_path / "sheet.png"))) == 0
    lines = capsys.readouterr().out
    assert "120 samples" in lines
    assert "circle, square, triangle" in lines
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.size == (8 * 128, 2 * (128 + 14))  # 16 images of 64 pixels, twice as large
    assert data(call("data", *typed, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["num_classes"] == 3
    with refused("sheet.png: cannot be written"):
        data(call("data", *typed, "--preview", str(tmp_path / "nowhere/sheet.png")))


def test_tokens_are_not_called_samples_nor_counted_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    (tmp_path / "w.txt").write_text("1\n" * 21)  # the text to train on has 21 windows
    typed = ["recipe=gpt", f"data.path={tmp_path}/a.txt", "data.block_size=4", f"data.weights={tmp_path}/w.txt"]
    assert data(call("data", *typed)) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert dict(lines[1:3]) == {"train": "90 tokens", "eval": "10 tokens"}


def test_pixels_are_those_before_normalization() -> None:
    original = torch.randint(0, 256, (2, 3, 4, 5))
    normalized = (original / 255 - 0.5) / 0.25
    assert (pixels(normalized, (0.5,), (0.25,)) == original.permute(0, 2, 3, 1).numpy()).all()
    unknown = pixels(normalized, (), ())
    assert (unknown.min(), unknown.max()) == (0, 255)


def test_labels_are_named_and_mixed_ones_with_their_shares() -> None:
    assert texts(torch.tensor([1, 0]), ["cat", "dog"]) == ["dog", "cat"]
    assert texts(torch.tensor([7]), None) == ["7"]
    assert texts(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), ["cat", "dog"]) == ["dog 75%, cat 25%", "cat 100%"]


def test_sheet_of_grey_images_has_a_row_for_each_eight() -> None:
    assert sheet(np.zeros((9, 28, 28, 1), np.uint8), ["0"] * 9).size == (8 * 112, 2 * (112 + 14))
