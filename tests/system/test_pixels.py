"""Pictures of every usual kind as bytes, and what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddpexp.errors import DdpexpError
from ddpexp.system.pixels import pixels_of, rgb_of
from tests.refusals import refused

RGB = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "picture",
    [
        RGB,
        RGB.astype(np.int64),
        RGB / 255,
        RGB.transpose(2, 0, 1),
        torch.from_numpy(RGB),
        torch.from_numpy(RGB).permute(2, 0, 1) / 255 + 1e-5,
        Image.fromarray(RGB),
        Image.fromarray(RGB).convert("RGBA"),
    ],
)
def test_pictures_keep_their_pixels(picture: Any) -> None:
    assert np.array_equal(rgb_of(picture, ""), RGB)


def test_a_tensor_has_its_channels_first_and_an_array_last_where_both_can_be_meant() -> None:
    assert pixels_of(torch.zeros(3, 5, 4), "").shape == (5, 4, 3)
    assert pixels_of(np.zeros((3, 5, 4)), "").shape == (3, 5, 4)
    assert pixels_of(np.zeros((3, 5, 6)), "").shape == (5, 6, 3)


def test_masks_and_palettes_are_shown_and_transparent_parts_are_white() -> None:
    assert rgb_of(np.eye(3, dtype=bool), "")[:, :, 1].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert np.array_equal(rgb_of(Image.new("P", (2, 2), 0), ""), np.zeros((2, 2, 3)))
    assert rgb_of(np.zeros((2, 2, 4), np.uint8), "").min() == 255


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("a.png", "a str"),
        (None, "a NoneType"),
        (RGB[None], "(1, 5, 6, 3): one by one"),
        (RGB[:, :, :2], "(5, 6, 2)"),
        (np.zeros((0, 3, 3)), "(0, 3, 3)"),
        (RGB.astype(np.float32), "divide it by 255"),
        (RGB / 128 - 1.0, "undo a normalization"),
        (RGB * np.nan, "from nan to nan"),
        (RGB.astype(str), "bytes, or floats"),
    ],
)
def test_what_is_no_picture_is_described(picture: Any, expected: str) -> None:
    for word in expected.split(": "):
        with refused(f"logger.image(): {word}", DdpexpError):
            pixels_of(picture, "logger.image()")
