"""Preparations on a file system that is really full: one sentence, and nothing is left."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddpexp.data.arrays.dataset import load as load_arrays
from ddpexp.data.arrays.prepare import prepare as arrays
from ddpexp.data.hf.prepare import prepare as hf
from ddpexp.data.image_folder.dataset import load as load_images
from ddpexp.data.image_folder.prepare import prepare as image_folder
from ddpexp.data.text.prepare import prepare as text
from ddpexp.errors import RefusedError
from tests.refusals import refused

pytestmark = pytest.mark.slow
ROWS = 100_000


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of a megabyte, with the user's cache in it."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def prepare_text(place: Path) -> None:
    (place / "t.txt").write_text("aé" * 250_000)
    text(str(place / "t.txt"), 8)


def prepare_arrays(place: Path) -> None:
    (place / "t.csv").write_text("a,b\n" + "1,0\n2,1\n" * (ROWS // 2))
    arrays(str(place / "t.csv"), targets="b", dtype="float64")


def prepare_hf(place: Path) -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("needs the library datasets")
    (place / "t.csv").write_text("a,b\n" + "1,0\n2,1\n" * (ROWS // 2))
    hf(str(place / "t.csv"), inputs="a", targets="b", dtype="float64")


def prepare_images(place: Path) -> None:
    for number in range(4):
        folder = place / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((400, 400, 3), number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    image_folder(str(place / "photos"), cache="raw", size=400, cache_size=400)


@pytest.mark.parametrize("prepare", [prepare_arrays, prepare_hf, prepare_images, prepare_text])
def test_a_full_disk_is_one_sentence_and_nothing_half_made_is_left(prepare: object, small: Path) -> None:
    assert callable(prepare)
    with refused("the prepared data: No space left on device") as caught:
        prepare(small)
    assert "\n" not in str(caught.value)
    left = [path for caches in small.rglob(".ddpexp-cache") for path in caches.rglob("*") if path.is_file()]
    assert [path for path in left if path.stat().st_size] == []


def table(place: Path) -> Callable[[], Any]:
    (place / "t.csv").write_text("a,b\n" + "1.5,0\n2,1\n" * 3000)
    return lambda: load_arrays(arrays(str(place / "t.csv"), targets="b", dtype="float64"))


def photographs(cache: Any) -> Callable[[Path], Callable[[], Any]]:
    def make(place: Path) -> Callable[[], Any]:
        for number in range(6):
            folder = place / "photos" / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((64, 64, 3), 30 * number, np.uint8)).save(folder / f"{number}.jpg")
        return lambda: load_images(image_folder(str(place / "photos"), cache=cache, size=56))

    return make


@pytest.mark.parametrize("make", [table, *(photographs(cache) for cache in ("raw", "jpeg", "none"))])
def test_a_disk_that_is_full_at_any_point_gives_all_or_nothing(
    make: Callable[[Path], Callable[[], Any]], small: Path
) -> None:
    """With room for one page more each time: the disk is full at the first file, at the second, and so on."""
    prepare = make(small)
    for room in range(200):
        used = os.statvfs(small)
        size = (used.f_blocks - used.f_bfree) * used.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={size + 4096 * room}", str(small)], check=True)
        problem = ""
        try:
            splits = prepare()
        except RefusedError as error:
            problem = str(error)
        if not problem:
            break
        assert "No space left on device" in problem
        assert "\n" not in problem
        left = [path for caches in small.rglob(".ddpexp-cache") for path in caches.rglob("*") if path.is_file()]
        assert [path for path in left if path.stat().st_size] == []
    assert room > 1
    inputs, targets = splits.train.gather(torch.arange(len(splits.train)), torch.device("cpu"))
    assert inputs.isfinite().all()
    assert targets.unique().tolist() == [0, 1]
