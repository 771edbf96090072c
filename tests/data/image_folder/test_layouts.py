"""Folders of images as people have them: a label keeps its name through every part, and no part is a class."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unicodedata import normalize

import pytest

from ddpexp.data.base import SampleNames, names_in
from ddpexp.data.image_folder.dataset import load
from ddpexp.data.image_folder.scan import scan, scan_unlabelled
from ddpexp.data.image_folder.to_predict import prepare as to_predict
from ddpexp.data.image_folder.walk import SUFFIXES
from ddpexp.data.schema import Field, Schema
from ddpexp.errors import RefusedError
from tests.data.image_folder.conftest import photo
from tests.refusals import refused

CLASSES = ("cat", "dog", "fox", "Zebra", "café", "naïve crème", "train station", "test tube", "10", "2", "übung")
TRAIN, EVAL, TEST = ("train", "training", "trainset"), ("val", "valid", "validation", "dev"), ("test", "testing")
OTHERS = (".txt", ".heic", ".db", ".svg", ".csv", "")
CASES: tuple[Callable[[str], str], ...] = (str.lower, str.upper, str.title)


@dataclass
class Made:
    """A folder of images, and what is in it: of each part and class the paths of the images."""

    root: Path
    chance: random.Random
    images: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    flat: bool = False  # no folders of parts

    def write(self, part: str, below: Path, name: str) -> None:
        """Write a class of a part: images, further folders, a linked one, hidden files, and files of other kinds."""
        chance = self.chance
        place = below / normalize(chance.choice(("NFC", "NFD")), name)
        folders = [place]
        if chance.random() < 0.3:
            folders.append(place / "more" / "of them")
        if chance.random() < 0.2:
            place.mkdir(parents=True, exist_ok=True)
            target = self.root / ".elsewhere" / f"{part} {name}"
            target.mkdir(parents=True)
            (place / "linked").symlink_to(target)
            folders.append(place / "linked")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(chance.randint(1, 2)):
                suffix = chance.choice(CASES)(chance.choice(SUFFIXES))
                self.add(folder / f"{number}{suffix}")
                found = self.images.setdefault((part, normalize("NFC", name)), set())
                found.add(str((folder / f"{number}{suffix}").relative_to(self.root)))
            if chance.random() < 0.3:
                suffix = chance.choice(OTHERS)
                self.add(folder / f"notes{suffix.upper()}")
                self.others[suffix or "without a suffix"] += 1
        self.add(place / ".hidden.jpg")
        (place / ".hidden").mkdir(exist_ok=True)

    def add(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def make(root: Path, seed: int) -> Made:
    """Make a folder that can be read, with parts or without."""
    made = Made(root, random.Random(seed))
    chance = made.chance
    names = chance.sample(CLASSES, chance.randint(2, 5))
    made.flat = chance.random() < 0.3
    if made.flat:
        for name in names:
            made.write("train", root, name)
        return made
    parts = [("train", TRAIN), ("eval", EVAL), ("test", TEST)][: chance.randint(1, 3)]
    for part, called in parts:
        below = root / chance.choice(CASES)(chance.choice(called))
        for name in names if part == "train" else chance.sample(names, chance.randint(1, len(names))):
            made.write(part, below, name)
    return made


def check(made: Made) -> None:
    """Compare what is read with what was made."""
    found = scan(str(made.root))
    read: dict[tuple[str, str], set[str]] = {}
    for part, files in found.parts.items():
        for file in files:
            read.setdefault((part, found.classes[file.label]), set()).add(file.path)
    assert read == made.images
    assert list(found.classes) == sorted({name for part, name in made.images if part == "train"})
    assert sum(map(len, read.values())) == sum(map(len, found.parts.values()))
    for suffix, count in made.others.items():
        assert f"{count:,} {suffix}" in found.left_out
    assert bool(made.others) == bool(found.left_out)
    assert found.without_images == []


def spoil(made: Made) -> str:
    """Change a folder into one that would train on something else than the classes; return how."""
    chance, root = made.chance, made.root
    parts = {part: root / next(iter(images)).split("/")[0] for (part, _), images in made.images.items()}
    flat = made.flat
    train = root if flat else parts["train"]
    one = next(path for path in sorted(train.iterdir()) if path.name[0] != ".")
    way = chance.choice(["circle", "inside", "above", *(["part as class"] if flat else ["compound", "twice"])])
    if way == "circle":
        (one / "zz up").symlink_to(chance.choice([root, one, root.parent]))
    elif way == "inside":
        made.add(one / chance.choice(["test", "Val", "Training_set", "train2"]) / "x.jpg")
    elif way == "above":
        inner = root.rename(root.with_name("inner"))
        for name in ("a", "b"):
            shutil.copytree(inner, root / name / "inner", symlinks=True)
        shutil.rmtree(inner)
    elif way == "compound":
        for part, folder in parts.items():
            folder.rename(root / chance.choice([f"{part.title()}_set", f"{part}-images2"]))
        if len(parts) > 1 and chance.random() < 0.5:
            for folder in list(root.iterdir()):
                folder.rename(root / f"seg_{folder.name}")
    elif way == "twice":
        made.add(root / next(name for name in ("TRAIN", "Training") if name != train.name) / "cat" / "x.jpg")
    else:
        made.add(root / chance.choice(["test", "Test_images", "VAL", "testset"]) / "x.jpg")
    return way


def walk(folder: Path, seeds: range) -> Counter[str]:
    ways: Counter[str] = Counter()
    for seed in seeds:
        made = make(folder / "root", seed)
        try:
            check(made)
            way = spoil(made)
            ways[way] += 1
            with pytest.raises(RefusedError) as caught:
                scan(str(made.root))
            assert "\n" not in str(caught.value)
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else None
            raise
        finally:
            shutil.rmtree(made.root)
    return ways


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return an empty folder, in memory where that is possible: thousands of small files are made there."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as made:
        yield Path(made)


def test_a_label_keeps_its_name_and_no_part_is_a_class(folder: Path) -> None:
    assert len(walk(folder, range(200))) == 6


@pytest.mark.slow
def test_a_label_keeps_its_name_in_ten_thousand_folders(folder: Path) -> None:
    assert len(walk(folder, range(1000, 11_000))) == 6


def refusal(root: Path) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        scan(str(root))
    assert (caught.value.key, caught.value.typed_value) == ("data.root", str(root))
    return caught.value


def touched(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def test_folders_of_classes_that_hold_only_folders_need_a_key(tmp_path: Path) -> None:
    root = touched(tmp_path / "root", "bad/patient1/a.jpg", "good/patient2/a.jpg")
    error = refusal(root)
    assert "bad/patient1, good/patient2" in error.reason
    assert "data.nested=true" in error.suggestion
    found = scan(str(root), nested=True)
    assert [(file.path, found.classes[file.label]) for file in found.parts["train"]] == [
        ("bad/patient1/a.jpg", "bad"), ("good/patient2/a.jpg", "good"),
    ]  # fmt: skip


def test_a_linked_folder_that_is_read_anyway_is_named(tmp_path: Path) -> None:
    root = touched(tmp_path / "root", "train/cat/a.jpg", "train/dog/b.jpg")
    (root / "train/cat/more").symlink_to("../dog")
    error = refusal(root)
    assert error.place == str(root / "train/dog")
    assert str(root / "train/cat/more") in error.reason


def test_classes_that_are_given_keep_their_numbers(tmp_path: Path) -> None:
    root = touched(tmp_path / "root", "train/dog/a.jpg", "val/cat/b.jpg", "train/cat/c.jpg", "seg_pred/d.jpg")
    found = scan(str(root), ("fox", "dog", "cat"))
    assert [file.label for file in found.parts["train"]] == [2, 1]
    assert (found.without_images, found.left_out) == (["fox"], "folders left out: seg_pred")
    with refused("folders"):
        scan(str(root), ("fox", "dog"))


def schema_of(*classes: str) -> dict[str, Any]:
    return Schema((3, 8, 8), (Field("image", "image"),), "float32", (Field("class", "category", classes),)).as_json()


def test_other_folders_are_numbered_as_in_training(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(photos / "val")
    shutil.rmtree(photos / "train" / "cat")
    prepared = to_predict(schema_of("cat", "dog", "fox"), root=str(photos / "train"))
    assert prepared["facts"]["classes"] == ["cat", "dog", "fox"]
    assert "none of cat, fox to train on" in prepared["note"]
    pictures = touched(tmp_path / "pictures", "a.heic", "test/b.txt")
    photo(8, 8, 0).save(pictures / "test/c.bmp")
    data = load(to_predict(schema_of("cat", "dog"), root=str(pictures))).evals["eval"]
    assert names_in(data) == SampleNames("file", ["test/c.bmp"])
    assert f"data.root={pictures}: files left out: 1 .heic, 1 .txt" in capsys.readouterr().err
    assert scan_unlabelled(str(photos), ("cat", "dog")) is None
