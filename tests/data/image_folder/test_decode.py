"""Every kind of image becomes the same upright pixels; what is broken is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpexp.data.image_folder.decode import BrokenImageError, decode, size_of
from ddpexp.data.image_folder.options import StoredSize, TransformOptions
from tests.data.image_folder.conftest import photo

_COLORS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 0]]], np.uint8)
QUARTERS = Image.fromarray(np.kron(_COLORS, np.ones((16, 24, 1), np.uint8)))  # red, green, blue, yellow


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    """Return the rounded colors in the corners: 0 or 255 in each channel."""
    array = np.asarray(image.convert("RGB")) > 127
    return [tuple((array[y, x] * 255).tolist()) for y in (2, -3) for x in (2, -3)]


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        ("RGB", "jpg"), ("RGB", "png"), ("RGB", "webp"), ("CMYK", "jpg"), ("P", "png"), ("RGBA", "png"),
        ("RGBA", "webp"),
        ("RGB", "bmp"), ("P", "bmp"), ("RGB", "gif"), ("P", "gif"), ("RGB", "tif"), ("RGBA", "tiff"), ("CMYK", "tif"),
        ("RGB", "jfif"), ("RGB", "ppm"),
    ],
)  # fmt: skip
def test_every_mode_and_format_becomes_rgb(mode: str, suffix: str, tmp_path: Path) -> None:
    path = str(tmp_path / f"image.{suffix}")
    QUARTERS.convert(mode).save(path)
    image = decode(path, StoredSize(100, 100), 3)
    assert (image.mode, image.size, size_of(path, StoredSize(100, 100))) == ("RGB", (48, 32), (32, 48))
    assert corners(image) == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    assert decode(path, StoredSize(100, 100), 1).mode == "L"


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        ("L", "png"),
        ("1", "png"),
        ("LA", "png"),
        ("I;16", "png"),
        ("L", "pgm"),
        ("I;16", "pgm"),
        ("1", "tif"),
        ("I;16", "tif"),
    ],
)
def test_grey_images_stay_grey(mode: str, suffix: str, tmp_path: Path) -> None:
    path = str(tmp_path / f"image.{suffix}")
    ramp = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (20, 1))
    image = Image.fromarray(ramp.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(ramp).convert(mode)
    image.save(path)
    decoded = np.asarray(decode(path, StoredSize(100, 100), 1)).astype(int)
    if mode == "1":
        assert set(decoded.ravel()) == {0, 255}
    else:
        assert np.abs(decoded - ramp).max() <= 1
    assert (np.asarray(decode(path, StoredSize(100, 100), 3)) == decoded[..., None]).all()


def test_transparent_parts_become_white(tmp_path: Path) -> None:
    path = str(tmp_path / "image.png")
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(path)
    assert (np.asarray(decode(path, StoredSize(100, 100), 3)) == 255).all()


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int, suffix: str, tmp_path: Path) -> None:
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]  # of Pillow's transpositions
    stored = QUARTERS if undo is None else QUARTERS.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = str(tmp_path / f"image.{suffix}")
    stored.save(path, exif=exif, quality=95)
    image = decode(path, StoredSize(100, 100), 3)
    assert size_of(path, StoredSize(100, 100)) == (32, 48)
    assert (image.size, corners(image)) == ((48, 32), [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)])


@pytest.mark.parametrize("size", [(400, 300), (300, 400), (301, 77), (50, 50)])
def test_shortest_side_is_limited_and_known_from_the_header(size: tuple[int, int], tmp_path: Path) -> None:
    path = str(tmp_path / "image.jpg")
    photo(*size, 0).save(path)
    image = decode(path, StoredSize(64, 64), 3)
    assert min(image.size) == min(64, *size)
    assert size_of(path, StoredSize(64, 64)) == (image.height, image.width)


@pytest.mark.parametrize(("shortest", "cache_size", "expected"), [
    (96, "auto", 96), (97, "auto", 64), (60, "auto", 60), (96, 64, 64), (65, 64, 64), (200, 128, 128),
])  # fmt: skip
def test_images_are_reduced_by_auto_only_where_it_saves_more_than_half(
    shortest: int, cache_size: Any, expected: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "image.jpg")
    photo(300, shortest, 0).save(path)
    stored = TransformOptions(size=56).stored_size(cache_size)
    assert size_of(path, stored)[0] == decode(path, stored, 3).height == expected


def test_the_first_frame_of_several_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "image.gif")
    QUARTERS.save(path, save_all=True, append_images=[Image.new("RGB", QUARTERS.size, "white")])
    assert corners(decode(path, StoredSize(100, 100), 3)) == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_of_32_bits_have_no_known_white(mode: str, tmp_path: Path) -> None:
    path = str(tmp_path / "image.tif")
    QUARTERS.convert("L").convert(mode).save(path)
    with pytest.raises(BrokenImageError, match=rf"its pixels are of 32 bits \(mode {mode}\)"):
        decode(path, StoredSize(100, 100), 3)


@pytest.mark.parametrize("suffix", ["bmp", "gif", "tif", "ppm", "webp", "png"])
def test_files_that_are_cut_off_are_reported_in_every_format(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"image.{suffix}"
    photo(200, 200, 0).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BrokenImageError):
        decode(str(path), StoredSize(100, 100), 3)


def test_broken_images_are_reported_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    photo(200, 200, 0).save(path)
    whole = path.read_bytes()
    for content, reason in (
        (b"", "empty"),
        (b"<html>", "it is no JPEG, PNG, WebP"),
        (whole[: len(whole) // 2], "truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(BrokenImageError, match=reason):
            decode(str(path), StoredSize(100, 100), 3)
