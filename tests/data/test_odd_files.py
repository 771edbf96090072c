"""What is no regular file under the name of one: refused by name at once, in every kind of data."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpexp.config.build import build
from ddpexp.config.declared import default_of
from ddpexp.data import weights
from ddpexp.data.arrays.prepare import prepare as prepare_arrays
from ddpexp.data.hf.prepare import prepare as prepare_hf
from ddpexp.data.image_folder.prepare import prepare as prepare_images
from ddpexp.data.images.files import prepare as prepare_image_arrays
from ddpexp.data.mnist import idx
from ddpexp.data.open_image import open_image
from ddpexp.data.tar_shards.prepare import prepare as prepare_shards
from ddpexp.data.text import tokenizer
from ddpexp.data.text.prepare import prepare as prepare_text
from ddpexp.errors import RefusedError
from ddpexp.run.prepare import _check_values
from ddpexp.settings.data import DATA_KEYS, CommonData, Data
from ddpexp.system.files import open_regular
from recipes.segment import prepare as prepare_segments
from tests.conftest import ROOT
from tests.data.conftest import prepare as prepare_mnist
from tests.data.tar_shards.test_tar_shards import write as write_shards
from tests.refusals import refused

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.timeout(30), pytest.mark.fault(74)]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def linked_pipe(path: Path) -> None:
    elsewhere = next(folder for folder in path.parents if folder.name == "data").with_name("a-pipe")
    os.mkfifo(elsewhere)
    path.symlink_to(elsewhere)


def listener(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


ODD: dict[Callable[[Path], None], str] = {
    pipe: "named pipe", endless: "device", linked_pipe: "named pipe", listener: "socket",
    broken_link: "No such file or directory",
}  # fmt: skip


def photos(folder: Path) -> None:
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / part / name / "0.png")


def image_arrays(folder: Path) -> None:
    for part in ("train", "test"):
        np.save(folder / f"{part}-images.npy", np.zeros((4, 8, 8), np.uint8))
        np.save(folder / f"{part}-labels.npy", np.zeros(4, np.uint8))


def masks(folder: Path) -> None:
    for part in ("train", "val"):
        for what in ("images", "masks"):
            (folder / part / what).mkdir(parents=True)
            Image.new("L", (8, 8)).save(folder / part / what / "0.png")


# How the other files are made, the name of the odd one, and what reads it.
Room = tuple[Callable[[Path], Any] | None, str, Callable[[Path], Any]]
ROOMS: dict[str, Room] = {
    "csv": (None, "a.csv", lambda path: prepare_arrays(str(path), None, "x")),
    "npy": (None, "a.npy", lambda path: prepare_arrays(str(path), target_type="none")),
    "npz": (None, "a.npz", lambda path: prepare_arrays(str(path), "x", "y")),
    "parquet": (None, "a.parquet", lambda path: prepare_arrays(str(path), None, "x")),
    "targets": (
        lambda folder: np.save(folder / "x.npy", np.zeros(3)), "y.npy",
        lambda path: prepare_arrays(str(path.with_name("x.npy")), None, str(path)),
    ),
    "text": (None, "a.txt", lambda path: prepare_text(str(path), 4)),
    "folder of texts": (
        lambda folder: (folder / "b.txt").write_text("text"), "a.txt", lambda path: prepare_text(str(path.parent), 4)
    ),
    "pattern of texts": (None, "a.md", lambda path: prepare_text(f"{path.parent}/*.md", 4)),
    "tokenizer": (None, "tokenizer.json", lambda path: tokenizer.configured(str(path))),
    "shard": (write_shards, "train-9.tar", lambda path: prepare_shards(f"{path.parent}/train-*.tar", None, ["cls"])),
    "photo": (photos, "train/cat/1.png", lambda path: prepare_images(str(path.parents[2]))),
    "photo for evaluation": (photos, "val/dog/1.jpg", lambda path: prepare_images(str(path.parents[2]), cache="none")),
    "images": (None, "train-images.npy", lambda path: prepare_image_arrays(str(path.parent), (0.5,), (0.5,))),
    "mask": (
        masks, "train/masks/0.png",
        lambda path: prepare_segments(str(path.parents[2])),
    ),
    "mnist": (None, f"{idx.FILES[0].name}.gz", lambda path: prepare_mnist(path.parent, "files")),
    "weights": (None, "w.npy", lambda path: weights.read_values(str(path), "data.weights")),
    "groups": (None, "g.txt", lambda path: weights.read_values(str(path), "data.group_by")),
    "hf": (None, "a.csv", lambda path: prepare_hf(str(path), inputs="x", targets="y")),
    "folder for hf": (
        lambda folder: (folder / "train.csv").write_text("x,y\n1,2\n"), "test.csv",
        lambda path: prepare_hf(str(path.parent), inputs="x", targets="y"),
    ),
}  # fmt: skip


def test_file_that_is_exchanged_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x")
    opened = os.open

    def exchanged(name: Any, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return opened(name, flags)

    monkeypatch.setattr(os, "open", exchanged)
    with pytest.raises(OSError, match="named pipe"):
        open_regular(path)


def test_image_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(OSError, match="named pipe"):
        open_image(tmp_path / "a.png")


@pytest.mark.parametrize("key", ["weights", "group_by", "lengths"])
def test_odd_file_with_a_value_for_each_sample_is_refused(key: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "values.npy")
    values = {key: str(tmp_path / "values.npy"), "prepare": None}
    common = build(CommonData, {name: values.get(name, default_of(f"data.{name}")) for name in DATA_KEYS}, "data")
    with refused(f"data.{key}: named pipe"):
        _check_values(Data(**vars(common), target="x", options={}), 3)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("room", ROOMS)
def test_odd_file_is_refused_by_name(room: str, odd: Callable[[Path], None], tmp_path: Path) -> None:
    make, name, prepare = ROOMS[room]
    folder = tmp_path / "data"
    folder.mkdir()
    if make is not None:
        make(folder)
    (folder / name).unlink(missing_ok=True)
    odd(folder / name)
    if odd is broken_link and name in ("a.md", "train-9.tar", f"{idx.FILES[0].name}.gz", "train-images.npy"):
        return  # a pattern does not match it
    with pytest.raises(RefusedError) as caught:
        prepare(folder / name)
    assert Path(name).name in str(caught.value)
    assert re.search(f"{ODD[odd]}|is not a regular file|does not exist", str(caught.value)), str(caught.value)


def test_no_other_way_opens_files_of_data() -> None:
    """What a cache holds was made here, and hashes of it are compared; everything else passes `open_regular`."""
    ours = {
        "cache.py", "npy.py", "hashes.py", "mirrors.py", "text/prepare.py", "hf/convert.py",
        "image_folder/prepare.py", "image_folder/to_predict.py", "arrays/store.py", "tar_shards/remote.py",
    }  # fmt: skip
    found = set()
    for path in [*(ROOT / "ddpexp/data").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("read_text", "read_bytes"):
                found.add(path)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "np.fromfile", "np.loadtxt"):
                found.add(path)
    assert found - {ROOT / "ddpexp/data" / name for name in ours} == set()
