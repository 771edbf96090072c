"""`ddpexp predict`: each sample once, in order, the same bytes at every number of workers."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ddpexp as package
from ddpexp.cli.predict import predict
from ddpexp.data.base import SampleNames
from ddpexp.errors import DdpexpError
from ddpexp.launch import Layout
from ddpexp.predict.files import check_holds, contents
from ddpexp.predict.job import Prediction, batch_size_of, provenance_of, request_of
from ddpexp.predict.names import Predictions, plain, printed
from ddpexp.predict.worker import _write, as_arrays
from ddpexp.run.stored_run import StoredRun, StoredWeights
from tests.conftest import Ddpexp, Done, python_path
from tests.examples import EXAMPLES
from tests.refusals import refused
from tests.typed import call

CONF = str(EXAMPLES / "patches/conf")
PATCHES = (f"--config-dir={CONF}",)


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is predicted is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of a model with a convolution and attention."""
    folder = tmp_path_factory.mktemp("trained")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DDPEXP_", "HYDRA_"))}
    start = Ddpexp(folder, {**kept, "PYTHONPATH": python_path(), "XDG_CACHE_HOME": str(folder / "cache")})
    run = folder / "run"
    done = start(*PATCHES, "recipe=patches", "trainer.max_steps=2", "logger=none", "trainer.gpus=1", f"run.dir={run}")
    assert done.code == 0, done.err
    return replace(done, run=run)


@pytest.mark.parametrize(
    "workers", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_bytes_are_the_same_at_every_number_of_workers(
    ddpexp: Ddpexp, trained: Done, tmp_path: Path, workers: int
) -> None:
    for count in (1, workers):
        done = ddpexp(
            "predict", str(trained.run), *PATCHES, f"--out={tmp_path}/{count}.npz", f"trainer.gpus={count}",
            "predict.batch_size=16",
        )  # fmt: skip
        assert done.code == 0, done.err
    alone, together = ((tmp_path / f"{count}.npz").read_bytes() for count in (1, workers))
    assert alone == together
    assert sorted(path.name for path in tmp_path.glob("*.npz*")) == ["1.npz", f"{workers}.npz"]
    found = np.load(tmp_path / "1.npz")
    made = json.loads(str(found["ddpexp"]))
    assert made["weights_sha256"] == trained.result()["weights_sha256"]
    assert (made["run"], made["weights"], made["split"]) == (str(trained.run.resolve()), "step-00000002", "eval")
    assert made["threads"] == trained.manifest()["world"]["threads"]
    assert made["classes"] == list("0123456789")
    run = package.open_run(trained.run, config_dir=CONF)
    images = ddpexp_images(run)
    expected = run.model()(images).softmax(1)
    np.testing.assert_allclose(found["probability"], expected.detach().numpy(), atol=1e-5)
    assert len(found["label"]) == len(images) == 101


def ddpexp_images(run: Any) -> torch.Tensor:
    """Return the images of the evaluation set, in their order."""
    from ddpexp.cli.api.build import open_splits

    data = open_splits(run.experiment()).evals["eval"]
    images: torch.Tensor = data.gather(torch.arange(len(data)), torch.device("cpu"))[0]
    return images


def test_a_task_without_predict_is_shown_what_to_write(ddpexp: Ddpexp, trained: Done, tmp_path: Path) -> None:
    done = ddpexp("predict", str(trained.run), *PATCHES, "--out", f"{tmp_path}/x.npz", "run.trust=[examples]",
                  "task._target_=examples.mine.mine.Regress")  # fmt: skip
    assert done.code == 2
    assert "def predict(self, model, batch):" in done.err
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "predict with what"),
        (["RUN"], "predict RUN: --input FILE"),
        (["RUN", "--input"], "predict --input: one value"),
        (["RUN", "--input", "none.png"], "--input none.png: no such"),
        (["RUN", "--input", "photos/*.png"], "--input photos/*.png: --input photos"),
        (["RUN", "photo.png"], "predict RUN photo.png: ddpexp predict RUN --input photo.png"),
        (["photo.png"], "predict photo.png: RUN_DIR --input photo.png"),
        (["RUN", "--input", "RUN", "--out", "x.npz", "--json"], "predict --json: leave one"),
        (["RUN", "--out"], "predict --out: one value"),
        (["RUN", "--out=x.npz", "--out=y.npz"], "predict --out: once"),
        (["RUN", "--out", "x.txt"], "--out x.txt: .parquet or .csv"),
        (["RUN", "--out", "x.npzz"], "--out x.npzz: --out x.npz?"),
        (["RUN", "--out", "none/x.npz"], "--out none/x.npz: make it first"),
        (["RUN", "--out", "x.npz", "--splt=test"], "predict --splt=test: --split"),
        (["NONE", "--out", "x.npz"], "predict NONE: no such"),
        (["RUN/checkpoints/step-00000009", "--out", "x.npz"], "step-00000009: no such"),
        (["RUN", "--out", "x.npz", "predict.batch_size=0"], "predict.batch_size=0"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(
    trained: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").symlink_to(trained.run)
    (tmp_path / "photo.png").touch()
    argv = [*arguments, *PATCHES] if arguments else []
    with refused(expected):
        predict(call("predict", *argv))


def test_parquet_without_pyarrow_is_refused_with_what_to_install(
    trained: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("x.parquet: pyarrow"):
        predict(call("predict", str(trained.run), "--out", str(tmp_path / "x.parquet")))


def test_batch_size_and_threads_do_not_follow_the_workers() -> None:
    experiment = package.compose(["recipe=mnist", "trainer.global_batch_size=96"]).experiment
    trainer = experiment.trainer
    assert batch_size_of(experiment) == 96
    assert batch_size_of(replace(experiment, trainer=replace(trainer, micro_batch_size=8))) == 8
    assert request_of(experiment, {"world": {"threads": 3}}).threads == 3
    assert request_of(experiment, {}).threads == 1
    typed = replace(experiment, trainer=replace(trainer, threads=2))
    assert request_of(typed, {"world": {"threads": 3}}).threads == 2


def test_data_of_a_single_set_is_named_by_that_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpexp.predict.job.prepare_to_predict", lambda *_: {"name": "x", "is_single_set": True})
    composed = package.compose(["recipe=mnist"])
    weights = StoredWeights(tmp_path, StoredRun(composed.experiment, "run: {}", None))
    for split in (None, "eval"):
        Prediction(weights, tmp_path / "x.npz", split).enter({}, Layout(1, 1, "cpu", "gloo", 1))
    with refused("--split train: only"):
        Prediction(weights, tmp_path / "x.npz", "train").enter({}, Layout(1, 1, "cpu", "gloo", 1))


def test_what_predict_returns_becomes_arrays() -> None:
    arrays = as_arrays({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": np.arange(2)}, 2, "samples 0 to 1")
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "a": ("float32", (2, 3)),
        "b": ("int64", (2,)),
    }
    assert list(as_arrays(torch.zeros(2), 2, "")) == ["prediction"]


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        (torch.zeros(3), "3 rows as 'prediction' for the samples 4 to 5"),
        (torch.zeros(()), "a single number"),
        ({"a": ["cat", "dog"]}, "list as 'a'"),
        (None, "NoneType"),
        ({}, "empty"),
    ],
)
def test_what_predict_should_not_return_is_named(predicted: Any, expected: str) -> None:
    with refused(expected, DdpexpError):
        as_arrays(predicted, 2, "samples 4 to 5")


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("x.npy", {"a": [], "b": []}, "x.npy: a, b"),
        ("x.csv", {"a": [3, 4]}, "x.csv: 3 x 4"),
        ("x.npz", {"ddpexp": []}, "metadata"),
    ],
)
def test_what_a_format_cannot_hold_is_named(name: str, shapes: dict[str, list[int]], expected: str) -> None:
    with refused(expected, DdpexpError):
        check_holds(Path(name), shapes)


def test_a_table_has_a_line_for_each_sample_and_says_beside_how_it_was_made() -> None:
    arrays = {"label": np.array([1, 0]), "score": np.array([[0.25, 0.5], [1, 2]])}
    found = contents(Path("x.csv"), Predictions(arrays, None), {"run": "r"})
    assert found[Path("x.csv")].decode() == "index,label,score_0,score_1\n0,1,0.25,0.5\n1,0,1.0,2.0\n"
    assert json.loads(found[Path("x.csv.json")]) == {"run": "r"}
    assert list(found) == [Path("x.csv.json"), Path("x.csv")]


FILES = SampleNames("file", ["b/a, b.jpg", "c\udcff.jpg"])


def test_a_table_of_pictures_begins_with_their_names() -> None:
    found = contents(Path("x.csv"), Predictions({"label": np.array([1, 0])}, FILES), {})[Path("x.csv")]
    assert found == b'file,label\n"b/a, b.jpg",1\nc\xff.jpg,0\n'
    own = contents(Path("x.csv"), Predictions({"file": np.array([1, 0])}, FILES), {})[Path("x.csv")]
    assert own == b"file\n1\n0\n", "an array that predict returns has its name"


def test_classes_and_targets_are_called_by_their_names() -> None:
    arrays = {"label": np.array([1, 0]), "probability": np.array([[0.25, 0.75], [1.0, 0.0]]), "other": np.eye(2)}
    named = Predictions(arrays, FILES, ["cat", "dog"])
    table = contents(Path("x.csv"), named, {})[Path("x.csv")].splitlines()
    assert table[0] == b"file,label,class,probability_cat,probability_dog,other_0,other_1"
    assert table[1] == b'"b/a, b.jpg",1,dog,0.25,0.75,1.0,0.0'
    archive = np.load(io.BytesIO(contents(Path("x.npz"), named, {})[Path("x.npz")]))
    assert (archive["class"].tolist(), archive["file"].tolist()) == (["dog", "cat"], list(FILES.values))
    beside = json.loads(
        contents(Path("x.npy"), Predictions({"label": np.array([1, 0])}, FILES), {})[Path("x.npy.json")]
    )
    assert beside["files"] == list(FILES.values)
    record = named.records()[0]
    assert {**record, "other": record["other"].tolist()} == {
        "file": "b/a, b.jpg", "label": 1, "class": "dog", "probability": {"cat": 0.25, "dog": 0.75}, "other": [1, 0],
    }  # fmt: skip
    assert plain(Predictions({"value": np.array([[np.nan, 2.0]])}, None, None, ["size", "price"]).records()[0]) == {
        "index": 0, "value": {"size": None, "price": 2.0},
    }  # fmt: skip
    for array in (np.array([1, 2]), np.array([0.0, 1.0]), np.eye(2, dtype=int)):
        assert list(Predictions({"label": array}, None, ["cat", "dog"]).named()) == ["label"], "not of these classes"
    assert list(Predictions({"class": np.array([1])}, None, ["cat", "dog"]).named()) == ["class", "class_name"]


def test_predictions_are_printed_below_one_another() -> None:
    arrays = {"label": np.array([1, 0]), "probability": np.array([[0.25, 0.75], [1.0, 0.0]]), "mask": np.zeros((2, 9))}
    records = [plain(one) for one in Predictions(arrays, SampleNames("id", [7, 12]), ["cat", "dog"]).records()]
    assert printed(records).splitlines() == [
        "id  label  class  probability         mask",
        "7   1      dog    dog 0.75, cat 0.25  9 numbers: --out FILE.npz",
        "12  0      cat    cat 1, dog 0        9 numbers: --out FILE.npz",
    ]


def test_a_parquet_file_has_a_row_for_each_sample_and_says_how_it_was_made(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrays = {"label": np.array([1, 0]), "score": np.array([[0.25, 0.5], [1, 2]])}
    names = SampleNames("file", ["a.jpg", "b.jpg"])
    [(path, content)] = contents(tmp_path / "y.parquet", Predictions(arrays, names, ["cat", "dog"]), {}).items()
    path.write_bytes(content)
    assert parquet.read_table(path).column_names == ["file", "label", "class", "score"]
    assert parquet.read_table(path)["file"].to_pylist() == ["a.jpg", "b.jpg"]
    [(path, content)] = contents(tmp_path / "x.parquet", Predictions(arrays, None), {"run": "r"}).items()
    path.write_bytes(content)
    table = parquet.read_table(path)
    assert table.to_pydict() == {"index": [0, 1], "label": [1, 0], "score": [[0.25, 0.5], [1.0, 2.0]]}
    assert json.loads(table.schema.metadata[b"ddpexp"]) == {"run": "r"}


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with refused("x.npz: cannot be written", DdpexpError):
        _write(gone / "x.npz", Predictions({"a": np.zeros(2)}, None), {})
    assert not gone.exists()


def test_the_file_says_which_data_it_is_of() -> None:
    data = {"name": "pets", "hash": "12", "folder": "/somewhere", "facts": {"classes": ["other"]}}
    experiment = package.compose(["recipe=mnist"]).experiment
    run = StoredRun(experiment, "", None, {"data": {"facts": {"classes": ["cat"]}}})
    made = provenance_of(StoredWeights(Path("step-1"), run), data, 2)
    assert made["data"] == {"name": "pets", "hash": "12"}
    assert made["classes"] == ["cat"]  # those of the training


def test_no_secret_is_in_a_file_of_predictions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_TOKEN", "q5zk-planted")
    made = {"weights": "/runs/q5zk-planted/w"}
    named = Predictions({"q5zk-planted": np.array([1, 2])}, SampleNames("file", ["a/q5zk-planted.png", "b.png"]))
    written = contents(tmp_path / "x.csv", named, made)
    written |= contents(tmp_path / "x.npz", named, made)
    assert len(written) == 3
    assert written[tmp_path / "x.csv"] == b"file,${MY_TOKEN}\na/${MY_TOKEN}.png,1\nb.png,2\n"
    assert not [path for path, content in written.items() if b"planted" in content or b"p\0l\0\0\0a" in content]
    assert "planted" not in str(np.load(io.BytesIO(written[tmp_path / "x.npz"]))["ddpexp"])
