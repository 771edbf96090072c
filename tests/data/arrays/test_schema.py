"""The schema that the training part decides: what it holds, what is read by it, and what is said of guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpexp.data.arrays import to_predict
from ddpexp.data.arrays.dataset import load
from ddpexp.data.arrays.prepare import prepare
from ddpexp.data.schema import Field, Schema
from ddpexp.errors import RefusedError
from tests.conftest import ROOT, Ddpexp
from tests.refusals import command_refused, is_about, refused

CPU = torch.device("cpu")
SHOPS = "city,opened,size,kind\nx,2026-01-02,1.5,a\ny,2026-01-03 12:00:00,2,b\nx,1970-01-01,3,a\n"


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What commands make of a table is tested, not how their processes start: forks."""
    return warm_environ


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def written(name: str, content: str) -> str:
    Path(name).write_text(content)
    return name


def rows(data: Any) -> list[list[float]]:
    inputs: list[list[float]] = data.gather(torch.arange(len(data)), CPU)[0].tolist()
    return inputs


def test_a_schema_is_json_and_read_again() -> None:
    inputs = (Field("age", "number", missing="median", fill=3.5), Field("city", "category", ("x", "y")))
    schema = Schema((3,), inputs, "float32", (Field("y", "category", ("a", "b"), numbered=True),), mean=(1.0, 2.0, 0.1))
    assert Schema.read(json.loads(json.dumps(schema.as_json()))) == schema
    assert schema.facts()["columns"] == ["age", "city=x", "city=y"]
    assert schema.decided().inputs[0].fill is None
    assert schema.decided().mean is None
    with refused("the schema of the data, in the record of a run or a cache"):
        Schema.read({**schema.as_json(), "inputs": [{"names": 1}]})


def test_categories_and_dates_become_numbers() -> None:
    columns: dict[str, Any] = {"city": "category", "opened": "date"}
    found = prepare(written("t.csv", SHOPS), targets="kind", columns=columns)
    assert rows(load(found).train) == [[1, 0, 20455, 1.5], [0, 1, 20456.5, 2], [1, 0, 0, 3]]
    assert found["facts"]["columns"] == ["city=x", "city=y", "opened", "size"]
    columns = {"city": "text", "opened": "drop", "size": "drop"}
    assert rows(load(prepare("t.csv", targets="kind", columns=columns, dtype="int64")).train) == [[0], [1], [0]]
    dates = load(prepare("t.csv", targets="opened", columns={"opened": "date"}, inputs="size"))
    assert dates.train.targets.tolist() == [20455, 20456.5, 0]


def test_a_file_for_a_trained_model_is_read_by_its_schema_alone() -> None:
    columns: dict[str, Any] = {"city": "category", "opened": "drop"}
    trained = prepare(written("t.csv", SHOPS), targets="kind", columns=columns)
    written("new.csv", "kind,size,city\nb,7,y\n")
    found = to_predict.prepare(trained["schema"], path="t.csv", eval_path="new.csv", targets="kind", columns=columns)
    splits = load(found)
    assert rows(splits.evals["eval"]) == [[0, 1, 7]]
    assert splits.evals["eval"].targets.tolist() == [1]
    assert found["schema"] == trained["schema"]
    written("new.csv", "size,city\n7,z\n")
    with refused("column city"):
        to_predict.prepare(trained["schema"], path="t.csv", eval_path="new.csv", targets="kind", columns=columns)


def test_a_cache_whose_training_part_decides_the_same_schema_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"path": written("t.csv", SHOPS), "inputs": "size", "targets": "kind"}
    trained = prepare(**options)
    monkeypatch.setattr("ddpexp.data.arrays.store.Reading.store", None)
    assert prepare(**options, schema=trained["schema"])["folder"] == trained["folder"]


@pytest.mark.parametrize(
    ("header", "row", "options", "guess"),
    [
        ("a,y", "{n},{c}", {}, "column a counts the rows, and is an input: data.columns={a: drop} leaves it out"),
        (",a,y", "{n},5,{c}", {}, "is an index without a name, and no input: data.inputs="),
        (
            "a,y",
            "0{d},{c}",
            {},
            "leading zeros, and names are read as they stand there with data.columns={a: category}",
        ),
        (
            "a;b,c;y",
            "{d};5;{c}",
            {},
            "the first line has 2 ';', which separate values, and 1 ',': data.delimiter names",
        ),
        ("a,y", "{d},{w}", {}, "column y has 3 classes, and no sample of 0: data.classes=[1,2] leaves"),
        ("a,y", "{d},{w}.0", {}, "holds 2 different numbers, predicted as amounts: data.target_type=class reads"),
        (
            "a,y",
            "{d},{o}",
            {},
            "holds 'other' in row 20, so its values are names of classes: data.target_type=class if",
        ),
        ("a,y", "17000000{n:02},{c}", {}, "column a has digits that float32 lacks: data.standardize=true computes"),
    ],
    ids=["count", "index", "zeros", "delimiter", "empty class", "few numbers", "odd name", "digits"],
)
def test_a_guess_that_a_person_could_doubt_is_a_line_with_the_key(
    header: str, row: str, options: dict[str, Any], guess: str
) -> None:
    values = [{"n": n, "d": n % 7, "c": "ab"[n % 2], "w": 1 + n % 2, "o": "other" if n == 19 else 1 + n % 2}
              for n in range(40)]  # fmt: skip
    found = prepare(
        written("t.csv", "\n".join([header, *(row.format(**one) for one in values)])), targets="y", **options
    )
    assert len(found["guesses"]) == 1, found["guesses"]
    assert guess in found["guesses"][0]


def test_an_index_that_is_listed_as_an_input_stays() -> None:
    path = written("t.csv", ",a,y\n0,5,p\n1,6,q\n2,7,p\n")
    assert prepare(path, targets="y")["facts"]["columns"] == ["a"]
    assert prepare(path, targets="y", inputs=("", "a"))["facts"]["columns"] == ["", "a"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"columns": {"town": "category"}}, "data.columns"),
        ({"columns": {"size": "drop"}, "inputs": ("size", "city")}, "data.columns.size=drop"),
        ({"missing": {"kind": "category"}}, "data.missing"),
        ({"missing": {"size": "none"}}, "data.missing.size=none"),
        (
            {"inputs": "city", "columns": {"city": "category"}, "missing": {"city": "mean"}},
            "data.missing.city=mean",
        ),
        ({"columns": {"size": "date"}}, "column size"),
        ({"delimiter": ";;"}, "data.delimiter=;;"),
        ({"classes": ("a", "b", "a")}, "data.classes"),
        ({"eval_path": "t.csv", "eval_inputs": ("size", "opened")}, "data.eval_inputs"),
    ],
)  # fmt: skip
def test_an_option_that_does_not_fit_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        prepare(written("t.csv", SHOPS), **{"inputs": "size", "targets": "kind", **options})
    assert is_about(caught.value, sentence)


def test_options_of_tables_are_refused_with_arrays() -> None:
    np.save("x.npy", np.zeros((4, 2)))
    np.save("y.npy", np.arange(4) % 2)
    with refused("data.missing"):
        prepare("x.npy", targets="y.npy", missing={"a": "mean"})


def test_arrays_of_names_and_of_large_numbers_are_read_as_tables_are() -> None:
    numbers = np.array([[1.7e9], [1.7e9 + 1], [1.7e9 + 2]])
    np.savez("d.npz", x=numbers, y=["1", "1_1", "x"])
    found = prepare("d.npz", inputs="x", targets="y")
    assert found["facts"]["classes"] == ["1", "1_1", "x"]
    np.savez("d.npz", x=[[1e300], [1.0]], y=[0, 1])
    with refused("x"):
        prepare("d.npz", inputs="x", targets="y")
    np.savez("d.npz", x=[[1.0], [2.0]], y=[16777217.0, 16777219.0])
    with refused("y"):
        prepare("d.npz", inputs="x", targets="y")
    wide = load(prepare("d.npz", inputs="x", targets="y", dtype="float64")).train
    assert wide.targets.tolist() == [16777217, 16777219]


def test_a_run_evaluates_predicts_and_resumes_by_its_schema(ddpexp: Ddpexp) -> None:
    """The evaluation file lacks a class, and the rest of the names are numbers."""
    lines = [f"{20 * number + 0.01 * row},{name}" for row in range(24) for number, name in enumerate(("1", "2", "x"))]
    (ddpexp.folder / "train.csv").write_text("\n".join(["a,y", *lines]))
    (ddpexp.folder / "few.csv").write_text("\n".join(["a,y", *(line for line in lines if not line.endswith("x"))]))
    (ddpexp.folder / "other.csv").write_text("\n".join(["a,y", *lines, "1,new"]))
    typed = (
        "--config-dir", str(ROOT / "examples/table/conf"), "recipe=table", "data.inputs=null", "data.targets=y",
        "data.validation_fraction=0", "logger=none", "trainer.gpus=1", "run.dir=run", "run.allow_changes=[data]",
    )  # fmt: skip
    trained = ddpexp(*typed, "data.path=train.csv", "data.eval_path=few.csv", "trainer.epochs=20")
    assert "eval/accuracy 100.00%" in trained.out, trained.err
    evaluated = ddpexp("evaluate", "run", "data.eval_path=few.csv", "data.path=few.csv", *typed[:2])
    assert "eval/accuracy 1\n" in evaluated.out, evaluated.err
    resumed = ddpexp(*typed, "data.path=few.csv", "data.eval_path=train.csv", "trainer.epochs=40")
    assert resumed.code == 0, resumed.err
    manifest = json.loads((ddpexp.folder / "run/manifest.json").read_text())
    assert manifest["data"]["schema"]["targets"][0]["categories"] == ["1", "2", "x"]
    refused = ddpexp(*typed, "data.path=other.csv", "data.eval_path=few.csv", "trainer.epochs=60")
    command_refused(refused, "column y: new in row 73", out=None)
