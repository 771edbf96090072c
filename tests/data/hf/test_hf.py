"""Data sets of Hugging Face's library, converted by the real one: run where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddpexp.config.instantiate import Trust, instantiate
from ddpexp.data.arrays.dataset import load
from ddpexp.data.hf.convert import convert
from ddpexp.data.hf.prepare import prepare
from ddpexp.settings.node import Node
from tests.refusals import refused

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
TABLE = "a,b,kind\n1,2,iris\n3,4.5,lily\n5,6,iris\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def everything(data: Any) -> tuple[Any, ...]:
    return tuple(part.tolist() for part in data.gather(torch.arange(len(data)), CPU))


def pictures(sizes: list[tuple[int, int]]) -> Any:
    images = [Image.fromarray(np.full((height, width, 3), 10 * number, np.uint8))
              for number, (height, width) in enumerate(sizes)]  # fmt: skip
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])})
    labels = [number % 2 for number in range(len(sizes))]
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet", "arrow"])
def test_columns_of_files_are_inputs_and_targets(kind: str) -> None:
    rows = [{"a": 1.0, "b": 2.0, "kind": "iris"}, {"a": 3.0, "b": 4.5, "kind": "lily"}]
    path = Path(f"t.{kind}")
    if kind in ("csv", "tsv"):
        path.write_text("a,b,kind\n1,2,iris\n3,4.5,lily\n".replace(",", "\t" if kind == "tsv" else ","))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk("d")
        next(Path("d").glob("*.arrow")).rename(path)
    found = prepare(str(path), inputs=("b", "a"), targets="kind")
    assert everything(load(found).train) == ([[2, 1], [4.5, 3]], [0, 1])
    assert found["facts"] == {
        "shape": [2], "num_features": 2, "columns": ["b", "a"], "classes": ["iris", "lily"], "num_classes": 2,
        "num_outputs": 2, "target_columns": ["kind"],
    }  # fmt: skip


def test_an_evaluation_file_is_read_by_the_schema_of_the_training_file() -> None:
    rows = [f"{row},{'xy'[row % 2]},{kind}" for row, kind in enumerate(["1", "2", "unknown", "01"] * 3)]
    Path("t.csv").write_text("\n".join(["a,city,kind", *rows]))
    Path("e.csv").write_text("kind,a,city\n2,7,y\n1,8,x\n01,9,x\n")
    columns: dict[str, Any] = {"city": "category"}
    options: dict[str, Any] = {"inputs": ("a", "city"), "targets": "kind", "columns": columns}
    found = prepare("t.csv", eval_path="e.csv", **options)
    assert found["facts"]["classes"] == ["01", "1", "2", "unknown"]
    assert everything(load(found).evals["eval"]) == ([[7, 0, 1], [8, 1, 0], [9, 1, 0]], [2, 1, 0])
    alone = prepare("e.csv", **options, schema=found["schema"])
    assert everything(load(alone).train) == ([[7, 0, 1], [8, 1, 0], [9, 1, 0]], [2, 1, 0])
    Path("e.csv").write_text("kind,a,city\n3,7,y\n")
    with refused("column kind: the class 3 in row 1"):
        prepare("e.csv", **options, schema=found["schema"])


def test_labels_of_another_set_go_by_the_names_that_it_gives_them() -> None:
    for name, labels in (("t", ["dog", "cat"]), ("e", ["cat", "dog"])):
        features = datasets.Features({"a": datasets.Value("float32"), "y": datasets.ClassLabel(names=labels)})
        datasets.Dataset.from_dict({"a": [1.0, 2.0], "y": [0, 1]}, features=features).save_to_disk(name)
    found = prepare("t", inputs="a", targets="y", eval_path="e")
    assert everything(load(found).evals["eval"])[1] == [1, 0]


def test_images_are_pixels_from_0_to_1_of_one_size() -> None:
    pictures([(8, 12), (12, 8), (9, 9), (8, 8)]).save_to_disk("d")
    found = prepare("d", inputs="image", targets="label", image_size=8)
    images, labels = load(found).train.gather(torch.tensor([2, 1]), CPU)
    assert images.shape == (2, 3, 8, 8)
    assert torch.equal(images[0], torch.full((3, 8, 8), 20.0) / 255)
    assert labels.tolist() == [0, 1]
    assert (found["facts"]["shape"], found["facts"]["classes"]) == ([3, 8, 8], ["dog", "cat"])
    with refused("data.inputs=image: row 2 has 12 x 8 pixels, but the image of row 1 has 8 x 12"):
        prepare("d", inputs="image", targets="label")


def test_a_folder_of_images_and_its_splits() -> None:
    for part, count in (("train", 4), ("validation", 2)):
        for number in range(count):
            place = Path("photos", part, ("cat", "dog")[number % 2])
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (6, 6), (number, 0, 0)).save(place / f"{number}.png")
    found = prepare("photos", inputs="image", targets="label", channels=1)
    assert (found["num_train"], found["num_test"]) == (4, 2)
    assert found["facts"]["shape"] == [1, 6, 6]
    with refused("data.eval_split=test: train, validation"):
        prepare("photos", inputs="image", targets="label", eval_split="test")


def test_texts_are_tokens_cut_off_and_filled() -> None:
    Path("t.jsonl").write_text('{"text": "abc", "label": 0}\n{"text": "äbcdef", "label": 1}\n')
    found = prepare("t.jsonl", inputs="text", targets="label", max_length=5)
    tokens, _ = everything(load(found).train)
    assert tokens == [[97, 98, 99, 256, 256], [*"äbcd".encode()]]
    assert (found["facts"]["vocab_size"], found["facts"]["pad_token"]) == (257, 256)


def test_lists_of_one_length_are_inputs() -> None:
    Path("t.jsonl").write_text('{"x": [[1, 2], [3, 4]], "y": 0.5}\n{"x": [[5, 6], [7, 8]], "y": 1.5}\n')
    found = prepare("t.jsonl", inputs="x", targets="y")
    assert everything(load(found).train) == ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [0.5, 1.5])
    Path("u.jsonl").write_text('{"x": [1, 2], "y": 0.5}\n{"x": [5], "y": 1.5}\n')
    with refused(": not numbers of one shape"):
        prepare("u.jsonl", inputs="x", targets="y")


def test_a_selection_of_a_saved_set_is_read_in_its_order() -> None:
    datasets.Dataset.from_dict({"a": [1.0, 2.0, 3.0], "k": ["x", "y", "x"]}).select([2, 1]).save_to_disk("d")
    assert everything(load(prepare("d", inputs="a", targets="k")).train) == ([[3], [2]], [0, 1])


@pytest.mark.parametrize("rows", [[0, 1], [2, 0]], ids=["the first rows", "selected rows"])
def test_descriptions_of_columns_are_copied_no_more_often_for_many_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    copies: list[int] = []
    copy = datasets.Features.copy

    def counted(features: Any) -> Any:
        copies[-1] += 1
        return copy(features)

    for count in (3, 30):
        names = [f"column {number}" for number in range(count)]
        data = datasets.Dataset.from_dict({name: [0.5, place, 2.5] for place, name in enumerate(names)}).select(rows)
        options: dict[str, Any] = {
            "target_type": "none",
            "classes": None,
            "dtype": "float32",
            "group_by": None,
            "columns": {},
        }
        request = {"path": "d", "inputs": names, "targets": None, "options": options, "schema": None}
        folder = tmp_path / str(count)
        folder.mkdir()
        copies.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(datasets.Features, "copy", counted)
            patch.setattr("ddpexp.data.hf.convert.open_sets", lambda _, data=data: {"train": data})
            record = convert({**request, "folder": str(folder)})
        inputs = np.load(folder / record["parts"]["train"]["inputs"])
        assert inputs[:, -1].tolist() == [[0.5, count - 1, 2.5][row] for row in rows]
    assert copies[0] == copies[1] > 0


def test_starting_again_converts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.csv").write_text(TABLE)
    first = prepare("t.csv", inputs="a", targets="kind")
    monkeypatch.setattr("ddpexp.data.hf.prepare._MODULE", "no_library_of_this_name")
    assert prepare("t.csv", inputs="a", targets="kind") == first


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (TABLE, {"inputs": "c"}, "data.inputs=c: a, b, kind"),
        (TABLE, {"targets": "c"}, "data.targets=c: a, b, kind"),
        (TABLE, {"split": "dev"}, "data.split=dev: train"),
        (TABLE, {"inputs": ("a", "kind")}, "data.inputs=kind"),
        (TABLE, {"inputs": "kind", "targets": "a", "standardize": True}, "data.standardize=true"),
        (TABLE + "1,,lily\n", {"inputs": "b"}, "column b: no value in row 4"),
        ("a,kind\n1,0\n2,-1\n", {}, "column kind: the class -1 in row 2"),
        ("a,kind\n", {}, "data.path=t.csv: cannot be read"),
        ('a,kind\n1,"2', {}, "data.path=t.csv: cannot be read"),
    ],
)
def test_data_that_is_wrong_is_refused(content: str, options: dict[str, Any], expected: str) -> None:
    Path("t.csv").write_text(content)
    with refused(expected) as caught:
        prepare("t.csv", **{"inputs": "a", "targets": "kind", **options})
    assert "\n" not in str(caught.value)
    assert not list(Path(".ddpexp-cache").glob("[!.]*")) or "standardize" in options


def test_a_name_of_the_hub_without_network_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with refused("data.path=some/where"):
        prepare("some/where", inputs="a", targets="b")
    assert capfd.readouterr() == ("", "")


def test_pictures_texts_and_rows_are_read_as_in_evaluation() -> None:
    set_of = {
        "images": pictures([(40, 30), (33, 20)]),
        "texts": datasets.Dataset.from_dict({"text": ["abc", "a long text"], "label": [0, 1]}),
        "rows": datasets.Dataset.from_dict({"a": [1.5, 2.0], "kind": ["x", "y"], "label": [0, 1]}),
        "lists": datasets.Dataset.from_dict({"vector": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]}),
    }
    for name, data in set_of.items():
        data.save_to_disk(name)
    Path("text.txt").write_text("a long text")
    for number, row in enumerate(set_of["images"]):
        row["image"].save(f"{number}.png")
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "images": ({"inputs": "image", "image_size": 16}, ["0.png", "1.png"]),
        "texts": ({"inputs": "text", "max_length": 8}, ["abc", Path("text.txt")]),
        "rows": (
            {"inputs": ("a", "kind"), "columns": {"kind": "category"}, "standardize": False},
            [{"a": 1.5, "kind": "x"}, {"kind": "y", "a": 2}],
        ),
        "lists": ({"inputs": "vector"}, [[1.0, 2.0], [3.0, 4.0]]),
    }
    for name, (options, given) in cases.items():
        known = prepare(name, targets="label", target_type="class", **options)
        expected = load(known).train.gather(torch.arange(2), CPU)[0]
        inputs = instantiate(Node("hf", options), Trust(), "data.read", given, json.loads(json.dumps(known)))
        assert torch.equal(inputs.samples.gather(torch.arange(2), CPU)[0], expected), name
