"""Folders of pictures without classes, to predict for."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

import ddpexp as package
from ddpexp.data.base import SampleNames, names_in
from ddpexp.data.image_folder.dataset import load
from ddpexp.data.image_folder.prepare import prepare
from ddpexp.data.image_folder.to_predict import prepare as to_predict
from ddpexp.data.schema import Field, Schema
from ddpexp.predict.names import plain
from examples.photos.draw import main as draw
from tests.conftest import ROOT, Ddpexp
from tests.refusals import refused

TRAINED = Schema(
    (3, 16, 16), (Field("image", "image"),), "float32", (Field("class", "category", ("cat", "dog")),)
).as_json()  # fmt: skip


@pytest.fixture
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is predicted is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture
def pictures(photos: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "holidays").mkdir(parents=True)
    shutil.copy(photos / "val/dog/0.jpg", folder / "b.jpg")
    shutil.copy(photos / "val/dog/1.jpg", folder / "holidays/a.jpg")
    shutil.copy(photos / "val/cat/0.jpg", folder / "a.jpg")
    return folder


def test_all_images_below_a_folder_are_one_set_in_the_order_of_their_paths(photos: Path, pictures: Path) -> None:
    found = to_predict(TRAINED, root=str(pictures), size=16)
    assert found["is_single_set"]
    indices, cpu = torch.arange(3), torch.device("cpu")
    data = load(found).evals["eval"]
    assert names_in(data) == SampleNames("file", ["a.jpg", "b.jpg", "holidays/a.jpg"])
    images, labels = data.gather(indices, cpu)
    trained = load(prepare(str(photos), size=16)).evals["eval"]
    expected, _ = trained.gather(torch.tensor([0, 2, 3]), cpu)
    assert torch.equal(images, expected)
    assert labels.tolist() == [-1, -1, -1]


def test_a_folder_with_classes_is_read_as_in_training(photos: Path) -> None:
    assert to_predict(TRAINED, root=str(photos)) == prepare(str(photos))


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with refused("data.root"):
        to_predict(TRAINED, root=str(tmp_path))


def test_three_commands_from_photographs_to_predictions(ddpexp: Ddpexp) -> None:
    draw(ddpexp.folder / "photos")
    pictures = ddpexp.folder / "pictures"
    pictures.mkdir()
    for number, path in enumerate(sorted((ddpexp.folder / "photos/val").rglob("*.jpg"))[:5]):
        shutil.copy(path, pictures / f"{number}.jpg")
    code = ("--config-dir", str(ROOT / "examples/photos/conf"))
    trained = ddpexp(*code, "recipe=photos", "data.size=24", "trainer.max_steps=3", "data.folds=3", "data.fold=0",
                     "trainer.gpus=1", "run.dir=run")  # fmt: skip
    assert trained.code == 0, trained.err
    done = ddpexp("predict", "run", *code, f"data.root={pictures}", "--out=p.csv", "trainer.gpus=1")
    assert done.code == 0, done.err
    lines = (ddpexp.folder / "p.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["file", *(f"{number}.jpg" for number in range(5))]
    with open(ddpexp.folder / "p.csv") as file:
        rows = list(csv.DictReader(file))
    given = ddpexp("predict", "run", *code, f"--input={pictures}", "--json")
    assert given.code == 0, given.err
    printed = json.loads(given.out)["predictions"]
    run = package.open_run(ddpexp.folder / "run", config_dir=ROOT / "examples/photos/conf")
    state = torch.get_rng_state()
    here = run.predict(pictures)
    assert torch.equal(torch.get_rng_state(), state)
    for row, of_command, of_python in zip(rows, printed, here, strict=True):
        assert of_command == plain(of_python)
        assert (row["file"], row["class"]) == (of_python["file"], of_python["class"])
        assert [float(row[f"probability_{name}"]) for name in of_python["probability"]] == list(
            of_python["probability"].values()
        )
    paths = [pictures / f"{number}.jpg" for number in range(5)]
    assert torch.equal(run.transform(paths), run.transform(pictures))
    assert run.model()(run.transform(paths[0])).argmax().item() == run.predict(paths[0])["label"]
