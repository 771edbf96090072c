"""Small folders of photographs: colored patches in JPEG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Save = Callable[..., Path]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of 6 photographs to train on and 2 to evaluate on, 40 x 30 pixels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    root = tmp_path / "photos"
    for part, number in (("train", 6), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for index in range(number):
                photo(40, 30, 10 * label + index).save(root / part / name / f"{index}.jpg")
    return root


def photo(width: int, height: int, seed: int) -> Image.Image:
    patches = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC)
