"""Files of images: what they must be, and what is said where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpexp.data.images.files import prepare
from ddpexp.errors import RefusedError
from tests.refusals import is_about, refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 20), ("test", 4)):
        np.save(tmp_path / f"{part}-images.npy", np.zeros((count, 3, 8, 8), np.uint8))
        np.save(tmp_path / f"{part}-labels.npy", np.zeros(count, np.int64))
    return tmp_path


NORM = {"mean": [0.5], "std": [0.5]}


def prepared(folder: Path, **options: Any) -> dict[str, Any]:
    return prepare(str(folder), **{"mean": (0.5,), "std": (0.5,), **options})


def test_what_is_found_is_reported(folder: Path) -> None:
    found = prepared(folder, flip=True)
    assert (found["num_train"], found["num_test"], found["flip"], found["crop"]) == (20, 4, True, 0)
    assert found["note"] == f"20 + 4 images of 3 x 8 x 8, from files in {folder}"


@pytest.mark.parametrize("kind", ["u1", "i1", "i2", "i4", "i8"])
def test_the_facts_are_classes_and_shape(folder: Path, kind: str) -> None:
    np.save(folder / "test-labels.npy", np.array([0, 2, 1, 0], kind))
    assert prepared(folder)["facts"] == {"num_classes": 3, "classes": ["0", "1", "2"], "shape": [3, 8, 8], **NORM}


@pytest.mark.parametrize("labels", [[-1] * 4, [10**6] * 4])
def test_labels_that_are_no_classes_give_no_number_of_classes(folder: Path, labels: list[int]) -> None:
    for part, count in (("train", 20), ("test", 4)):
        np.save(folder / f"{part}-labels.npy", np.resize(np.array(labels), count))
    assert prepared(folder)["facts"] == {"shape": [3, 8, 8], **NORM}


@pytest.mark.parametrize("name", ["train-images.npy", "test-labels.npy"])
def test_other_content_has_another_hash_wherever_it_lies(folder: Path, name: str) -> None:
    before = prepared(folder)["hash"]
    assert prepared(folder)["hash"] == before
    other = np.load(folder / name)
    other.flat[-1] = 1
    np.save(folder / name, other)
    assert prepared(folder)["hash"] != before


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("train-images", np.zeros((20, 3, 8, 8), np.float32), "train-images.npy: shape"),
        ("train-images", np.zeros((20, 64), np.uint8), "train-images.npy: shape"),
        ("train-images", np.asfortranarray(np.zeros((20, 3, 8, 8), np.uint8)), "train-images.npy: numbers"),
        (
            "test-images",
            np.zeros((4, 3, 9, 8), np.uint8),
            "data.root",
        ),
        ("test-labels", np.zeros(5, np.int64), "test-labels.npy: shape"),
        ("test-labels", np.zeros(4, np.float64), "test-labels.npy: shape"),
    ],
)
def test_arrays_that_are_no_images_are_refused(folder: Path, name: str, array: Any, sentence: str) -> None:
    np.save(folder / f"{name}.npy", array)
    with pytest.raises(RefusedError) as caught:
        prepared(folder)
    assert is_about(caught.value, sentence)


def test_a_folder_of_something_else_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(RefusedError) as caught:
            prepared(tmp_path / "root")
        assert is_about(caught.value, "data.root: labels")
        assert is_about(caught.value, f"data.root={tmp_path / 'root'}: data")
        return str(caught.value).removeprefix(f"data.root={tmp_path / 'root'} ").partition(":")[0]

    assert said() == "does not exist"
    (tmp_path / "root/deep").mkdir(parents=True)
    assert said() == "holds deep"
    (tmp_path / "root/train.csv").touch()
    assert said() == "holds deep, train.csv"
    (tmp_path / "root/deep/train/cat").mkdir(parents=True)
    (tmp_path / "root/deep/train/cat/a.PNG").touch()
    assert said() == "holds deep, train.csv"  # too deep to be data.root
    (tmp_path / "root/train/cat").mkdir(parents=True)
    (tmp_path / "root/train/cat/a.jpeg").touch()
    assert said() == "holds folders of images such as train/cat/a.jpeg"
    (tmp_path / "root/b.png").touch()
    assert said() == "holds images such as b.png"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory"),
        (b"", ".npy"),
        (b"\x93NUMPY\x01\x00\x05\x00[1, 2", ".npy"),
        (b"\x93NUMPY\x01\x00\x10\x00{'descr': '|u1'}", ".npy"),
    ],
)
def test_files_that_are_no_arrays_are_refused(folder: Path, content: bytes | None, sentence: str) -> None:
    path = folder / "train-images.npy"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with refused(f"train-images.npy: {sentence}"):
        prepared(folder)


def test_a_file_that_was_cut_off_is_refused_before_a_worker_reads_past_its_end(folder: Path) -> None:
    path = folder / "train-images.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with refused("train-images.npy"):
        prepared(folder)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mean": (0.5, 0.5)}, "data.mean=[0.5, 0.5]"),
        (
            {"mean": (0.5,) * 3},
            "data.mean=[0.5, 0.5, 0.5]",
        ),
        ({"std": (0.0,)}, "data.std=[0.0]"),
        ({"crop": 9}, "data.crop=9"),
        ({"crop": -1}, "data.crop=-1"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        prepared(folder, **options)
    assert is_about(caught.value, sentence)


def test_the_folder_must_be_named() -> None:
    with refused("data.root"):
        prepare(None, (0.5,), (0.5,))
