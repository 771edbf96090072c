"""Arrays and tables: what batches hold, and what is said where a file or an option is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpexp.config.compose import compose_command
from ddpexp.config.parse import parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.schema import Experiment
from ddpexp.data.arrays import to_predict
from ddpexp.data.arrays.dataset import load
from ddpexp.data.arrays.prepare import prepare
from ddpexp.data.datasets import Splits
from ddpexp.distributed.world import World
from ddpexp.run.prepare import prepare as prepare_section
from ddpexp.run.prepare import prepare_to_evaluate
from ddpexp.train.choose_samples import arrange
from ddpexp.train.load_data import load_sets
from tests.refusals import refused

CPU = torch.device("cpu")
FLOWERS = "a,b,kind\n1,2,iris\n3,4.5,lily\n5,6,iris\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def written(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def everything(data: Any) -> tuple[Any, ...]:
    return tuple(part.tolist() for part in data.gather(torch.arange(len(data)), CPU))


def arrays(**more: Any) -> dict[str, Any]:
    """Store arrays, and return the options that name the first two."""
    for name, array in {"x": np.arange(12.0).reshape(6, 2), "y": np.arange(6) % 3, **more}.items():
        np.save(f"{name}.npy", array)
    return {"path": "x.npy", "targets": "y.npy"}


def test_columns_of_a_table_are_inputs_and_classes_are_numbered_by_their_names() -> None:
    found = prepare(written("t.csv", FLOWERS), targets="kind")
    splits = load(found)
    assert everything(splits.train) == ([[1, 2], [3, 4.5], [5, 6]], [0, 1, 0])
    assert splits.train.gather(torch.tensor([0]), CPU)[0].dtype == torch.float32
    assert found["facts"] == {
        "shape": [2], "num_features": 2, "columns": ["a", "b"], "classes": ["iris", "lily"], "num_classes": 2,
        "num_outputs": 2, "target_columns": ["kind"],
    }  # fmt: skip
    assert (found["num_train"], found["num_test"]) == (3, 0)


def test_columns_are_chosen_by_name_in_the_sequence_of_their_names() -> None:
    found = prepare(written("t.csv", FLOWERS), inputs=("b", "a"), targets="kind", classes=("lily", "iris"))
    assert everything(load(found).train) == ([[2, 1], [4.5, 3], [6, 5]], [1, 0, 1])


def test_numbers_are_targets_as_they_are() -> None:
    one = load(prepare(written("t.csv", FLOWERS), inputs="a", targets="b")).train
    assert everything(one) == ([[1], [3], [5]], [2, 4.5, 6])
    two = load(prepare("t.csv", inputs="a", targets=("a", "b")[1:], target_type="number")).train
    assert two.gather(torch.tensor([1]), CPU)[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "options", "is_doubted"),
    [
        (range(1000, 1030), {}, True),
        ([0, 1] * 15, {}, False),
        (range(1000, 1030), {"target_type": "class"}, False),
        ([f"n{value}" for value in range(30)], {}, False),
    ],
)
def test_whole_numbers_that_are_hardly_classes_are_pointed_out(
    values: Sequence[Any], options: dict[str, Any], is_doubted: bool
) -> None:
    path = written("prices.csv", "size,price\n" + "".join(f"{row},{value}\n" for row, value in enumerate(values)))
    guesses = prepare(path, targets="price", **options)["guesses"]
    assert ("data.target_type=number predicts amounts" in "".join(guesses)) == is_doubted


def test_a_file_that_is_not_read_says_what_would_be() -> None:
    written("t.tsv", "a\tb\n1\t2\n")
    with refused("data.path"):
        prepare("t.tsv", targets="b")


def test_a_table_may_be_separated_by_semicolons_and_begin_with_a_mark() -> None:
    found = prepare(written("t.csv", "\ufeffa;b\n1;0\n2;1\n"), targets="b")
    assert everything(load(found).train) == ([[1], [2]], [0, 1])


def test_the_classes_of_a_further_file_are_those_of_the_training_file() -> None:
    other = written("e.csv", "kind,b,a\nlily,1,2\n")
    found = prepare(written("t.csv", FLOWERS), inputs=("a", "b"), targets="kind", eval_path=other)
    assert everything(load(found).evals["eval"]) == ([[2, 1]], [1])


def test_an_array_is_mapped_as_it_is() -> None:
    found = prepare(**arrays())
    assert found["parts"]["train"]["inputs"] == str(Path("x.npy").absolute())
    assert everything(load(found).train) == (np.arange(12).reshape(6, 2).tolist(), [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("array", [np.arange(12, dtype=">f4").reshape(6, 2), np.arange(12).reshape(2, 6).T,
                                   np.arange(12, dtype=np.uint16).reshape(6, 2)])  # fmt: skip
def test_an_array_that_torch_cannot_map_is_converted(array: Any) -> None:
    found = prepare(**arrays(x=array))
    assert found["parts"]["train"]["inputs"] == "train-inputs.npy"
    assert everything(load(found).train)[0] == array.tolist()


def test_the_parts_of_an_npz_file_may_be_arrays_of_it() -> None:
    x = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    np.savez_compressed("d.npz", x_train=x, y_train=np.arange(6) % 2, x_test=x[:2], y_test=[1, 0])
    found = prepare(
        "d.npz", inputs="x_train", targets="y_train", eval_inputs="x_test", eval_targets="y_test", dtype="float64"
    )
    splits = load(found)
    assert everything(splits.evals["eval"]) == (x[:2].tolist(), [1, 0])
    assert splits.train.gather(torch.tensor([0]), CPU)[0].dtype == torch.float64
    assert found["facts"]["shape"] == [2, 2]
    assert "num_features" not in found["facts"]


def test_data_without_targets_gives_inputs_alone() -> None:
    arrays()
    assert everything(load(prepare("x.npy", target_type="none")).train) == (np.arange(12).reshape(6, 2).tolist(),)


def test_starting_again_reads_nothing_and_other_content_has_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(written("t.csv", FLOWERS), targets="kind")
    with monkeypatch.context() as reading:
        reading.setattr("ddpexp.data.arrays.store.Reading.store", None)
        assert prepare("t.csv", targets="kind") == first
    assert prepare(written("t.csv", FLOWERS.replace("4.5", "4.25")), targets="kind")["hash"] != first["hash"]


def test_a_file_that_changes_between_preparation_and_loading_is_noticed() -> None:
    found = prepare(written("t.csv", FLOWERS), targets="kind")
    written("t.csv", FLOWERS + "7,8,iris\n")
    with refused("data.path"):
        load(found)


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        ("", {}, "data.path=t.csv"),
        ("a,kind\n", {}, "data.path: rows"),
        (FLOWERS, {"targets": "sort"}, "data.targets=sort"),
        (FLOWERS, {"inputs": ("a", "c")}, "data.inputs=c"),
        (FLOWERS, {"targets": None}, "data.targets"),
        (FLOWERS, {"inputs": "kind"}, "data.inputs"),
        (FLOWERS, {"inputs": ("a", "b"), "targets": "a", "target_type": "none"}, "data.target_type=none"),
        (FLOWERS, {"target_type": "number"}, "column kind: iris"),
        (FLOWERS, {"classes": ("iris", "rose")}, "column kind: lily"),
        (FLOWERS, {"dtype": "int64"}, "column b: dtype"),
        (FLOWERS + "1,2", {}, "data.path: values"),
        (FLOWERS + "1,,lily\n", {}, "column b: empty"),
        (FLOWERS + "1,nan,lily\n", {}, "column b: needed"),
        (FLOWERS + "1,two,lily\n", {}, "column b: number"),
        ("a,a\n1,2\n", {}, "data.path: columns"),
        ("a,kind\n1,iris\n2,iris\n", {}, "column kind: one class"),
        ("a,kind\n1,0\n2,-1\n", {}, "column kind: numbers"),
        ("a,kind\n1,0\n2,3\n", {"classes": ("x", "y")}, "column kind: class"),
        (b"a,kind\n\xff,2\n", {}, "data.path: text"),
    ],
)  # fmt: skip
def test_a_table_that_is_wrong_is_refused(content: str | bytes, options: dict[str, Any], sentence: str) -> None:
    path = written("t.csv", content)
    with refused(sentence) as caught:
        prepare(path, **{"targets": "kind", **options})
    assert "\n" not in str(caught.value)
    assert not list(Path(".ddpexp-cache").glob("[!.]*"))


@pytest.mark.parametrize(
    ("more", "options", "sentence"),
    [
        ({"y": np.arange(5)}, {}, "targets"),
        ({"x": np.array([[1.0], [np.nan]]), "y": np.arange(2)}, {}, "x.npy: nan"),
        ({"x": np.array([[1.0], [np.inf]]), "y": np.arange(2)}, {}, "x.npy: inf"),
        ({"x": np.zeros((0, 2))}, {}, "x.npy: shape"),
        ({"x": np.array(["a"] * 6)}, {}, "x.npy: texts"),
        ({"x": np.array([{}] * 6)}, {}, "x.npy: objects"),
        ({}, {"targets": None}, "data.targets=null"),
        ({}, {"targets": "z.npy"}, "data.targets=z.npy"),
        ({}, {"inputs": "x"}, "data.inputs=x"),
        ({}, {"eval_path": "x.npy"}, "data.eval_targets"),
        ({"z": np.zeros((6, 3))}, {"eval_path": "z.npy", "eval_targets": "y.npy"}, "shape"),
        ({"z": np.arange(6)}, {"eval_path": "x.npy", "eval_targets": "z.npy"}, "z.npy"),
        ({"x": np.zeros((6, 2, 2))}, {"standardize": True}, "data.standardize=true"),
        ({"y": np.zeros((6, 2), int)}, {"target_type": "class"}, "y.npy"),
    ],
)  # fmt: skip
def test_an_array_that_is_wrong_is_refused(more: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with refused(sentence) as caught:
        prepare(**{**arrays(**more), **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (lambda whole: whole[: len(whole) // 2], "damaged"),
        (lambda whole: b"text", "not a .npy file"),
        (lambda whole: whole[:20], "damaged"),
    ],
)
def test_a_damaged_array_is_refused(content: Any, word: str) -> None:
    options = arrays()
    written("x.npy", content(Path("x.npy").read_bytes()))
    with refused(f"x.npy: {word}"):
        prepare(**options)


def test_a_damaged_npz_file_is_refused() -> None:
    np.savez("d.npz", x=np.arange(9), y=np.arange(9))
    for content in (Path("d.npz").read_bytes()[:-40], b"text"):
        written("d.npz", content)
        with refused("data.path"):
            prepare("d.npz", targets="y")


def test_arrays_of_an_npz_file_are_chosen_by_names_that_it_has() -> None:
    np.savez("d.npz", x=np.arange(9), z=np.arange(9), y=np.arange(9))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"targets": "t"}, "data.targets=t"),
        ({"targets": "y"}, "data.inputs"),
        ({}, "data.targets"),
    )
    for options, key in cases:
        with refused(key):
            prepare("d.npz", **options)


def experiment(*overrides: str) -> Experiment:
    composed = compose_command(["recipe=mnist", "data=arrays", *overrides])
    assert isinstance(composed, ResolvedConfig)
    return parse(composed.values)


def arranged(*overrides: str) -> tuple[dict[str, Any], Splits]:
    configured = experiment(*overrides)
    prepared = prepare_section(configured.data, configured.trust)
    assert prepared is not None
    return prepared, arrange(load_sets(configured, prepared), configured, World(0, 0, 0, 1, 1, CPU))


@pytest.mark.parametrize(
    "division",
    [
        (), ("data.validation_fraction=0.3",), ("data.validation_fraction=0.3", "data.stratify=true"),
        ("data.folds=3", "data.fold=1"), ("data.validation_fraction=0.3", "data.group_by=g"),
        ("data.folds=3", "data.fold=2", "data.group_by=groups.txt"),
    ],
)  # fmt: skip
def test_standardized_columns_have_mean_0_and_std_1_where_they_are_trained_on(
    division: tuple[str, ...],
) -> None:
    numbers = np.random.default_rng(0).normal(1e3, 3, 60)
    rows = "".join(f"{number},7,{row % 6},{'xyz'[row % 3]}\n" for row, number in enumerate(numbers))
    written("t.csv", "a,same,g,kind\n" + rows)
    written("groups.txt", "".join(f"{row % 5}\n" for row in range(60)))
    prepared, splits = arranged(
        "data.path=t.csv", "data.inputs=[a,same]", "data.targets=kind", "data.standardize=true", *division
    )
    inputs, _ = splits.train.gather(torch.arange(len(splits.train)), CPU)
    assert inputs[:, 0].mean().abs() < 1e-4
    assert (inputs[:, 0].std(correction=0) - 1).abs() < 1e-4
    assert not inputs[:, 1].any()
    assert prepared["facts"]["std"][1] == 1
    if division:
        held, _ = splits.evals["validation"].gather(torch.arange(len(splits.evals["validation"])), CPU)
        assert held[:, 0].mean().abs() > 1e-4
        assert len(inputs) + len(held) == 60


def test_a_source_of_a_mixture_is_not_standardized_by_what_is_held_out() -> None:
    mixture = experiment("data.path=t.csv", "data.standardize=true").data
    whole = replace(mixture, sources={"a": mixture}, validation_fraction=0.1)
    with refused("data.sources.a.standardize=true"):
        prepare_section(whole, experiment("data.path=t.csv").trust)


def test_rows_are_moved_to_a_device_as_they_are() -> None:
    splits = load(prepare(**arrays()))
    moved = splits.train.to(CPU)
    assert everything(moved) == everything(splits.train)
    assert splits.train.num_bytes == 12 * 8 + 6 * 8


def predicted_for(trained: dict[str, Any], **options: Any) -> dict[str, Any]:
    return to_predict.prepare(trained["schema"], **{"targets": "kind", **options})


def test_a_table_without_targets_is_predicted_for_with_the_columns_of_the_run() -> None:
    trained = prepare(written("t.csv", FLOWERS), targets="kind")
    for key in ("path", "eval_path"):
        found = predicted_for(trained, **{"path": "t.csv", key: written("new.csv", "id,b,a\nx,1,2\ny,3,4\n")})
        assert found["is_single_set"]
        splits = load(found)
        assert everything(splits.evals["eval"]) == ([[2, 1], [4, 3]], [-1, -1])
        assert found["facts"]["classes"] == ["iris", "lily"]


def test_an_array_without_targets_is_predicted_for() -> None:
    trained = prepare(**{**arrays(y=np.arange(6) / 2), "target_type": "number"})
    np.save("new.npy", np.zeros((2, 2)))
    found = to_predict.prepare(trained["schema"], path="x.npy", targets="y.npy", eval_path="new.npy")
    inputs, targets = load(found).evals["eval"].gather(torch.arange(2), CPU)
    assert inputs.tolist() == [[0, 0], [0, 0]]
    assert targets.isnan().all()


def test_a_file_with_targets_is_predicted_for_without_the_training_file() -> None:
    trained = prepare(written("t.csv", FLOWERS), targets="kind")
    Path("t.csv").rename("moved.csv")
    found = predicted_for(trained, path="t.csv", eval_path=written("e.csv", "a,b,kind\n1,2,lily\n"))
    assert everything(load(found).evals["eval"]) == ([[1, 2]], [1])


def test_other_data_is_standardized_as_that_of_the_run_and_has_its_classes() -> None:
    written("t.csv", FLOWERS)
    configured = experiment("data.path=t.csv", "data.targets=kind", "data.standardize=true")
    trained = prepare_section(configured.data, configured.trust)
    assert trained is not None
    written("o.csv", FLOWERS.replace("iris", "lily") + "9,9,iris")
    other = experiment("data.path=o.csv", "data.targets=kind", "data.standardize=true")
    found = prepare_to_evaluate(other.data, other.trust, trained, stored=False)
    assert found is not None
    assert {key: found["facts"][key] for key in ("mean", "std", "classes")} == {
        key: trained["facts"][key] for key in ("mean", "std", "classes")
    }
    assert not found.get("is_single_set")


def test_targets_that_are_numbers_have_a_mean_too_and_classes_none() -> None:
    rows = "".join(f"{row},{row % 2},{3 + 4 * (row % 2)}\n" for row in range(10))
    written("n.csv", "a,kind,size\n" + rows)
    found, _ = arranged("data.path=n.csv", "data.inputs=a", "data.targets=[size,kind]", "data.standardize=true")
    facts = found["facts"]
    assert (facts["num_outputs"], facts["target_mean"], facts["target_std"]) == (2, [5, 0.5], [2, 0.5])
    found, _ = arranged("data.path=n.csv", "data.inputs=a", "data.targets=kind", "data.standardize=true")
    facts = found["facts"]
    assert (facts["num_outputs"], facts["target_mean"], facts["target_std"]) == (2, None, None)


def test_what_has_other_inputs_is_not_predicted_for() -> None:
    trained = prepare(**arrays())
    np.save("new.npy", np.zeros((2, 3)))
    with refused("shape"):
        to_predict.prepare(trained["schema"], path="new.npy")
    flowers = prepare(written("t.csv", FLOWERS), targets="kind")
    with refused("data.inputs=b"):
        predicted_for(flowers, path=written("new.csv", "a\n1\n"))


@pytest.mark.slow
def test_columns_of_parquet_files_are_read_with_pyarrow() -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kinds = pyarrow.array(["x", "y", "x"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"a": [1.5, 2, 3], "b": [True, False, True], "k": kinds}), "t.parquet")
    assert everything(load(prepare("t.parquet", targets="k")).train) == ([[1.5, 1], [2, 0], [3, 1]], [0, 1, 0])
    assert everything(load(prepare("t.parquet", inputs="a", targets="b")).train) == ([[1.5], [2], [3]], [1, 0, 1])
    parquet.write_table(pyarrow.table({"a": [1, None], "l": [[1], [2]], "k": [0, 1]}), "n.parquet")
    for column, expected in (("a", "column a: row 2"), ("l", "data.path: column l"), ("c", "data.inputs=c: column")):
        with refused(expected):
            prepare("n.parquet", inputs=column, targets="k")
    written("n.parquet", Path("n.parquet").read_bytes()[:-30])
    with refused("data.path: damaged") as caught:
        prepare("n.parquet", targets="k")
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("data.path"):
        prepare(written("t.parquet", "x"), targets="k")
