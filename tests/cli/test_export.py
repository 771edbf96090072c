"""`ddpexp export`: a model for other programs, compared with the one that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddpexp.cli.api.opened import open_run
from ddpexp.cli.export import export
from ddpexp.export.request import described, request_of
from ddpexp.export.weights import export_weights
from ddpexp.export.worker import _difference, export_model, inputs_of
from ddpexp.run.stored_run import find_weights
from tests.conftest import ROOT
from tests.refusals import refused
from tests.typed import call

FEW = ("data.source=embedded", "data.embedded_train=8", "data.embedded_test=8")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(ROOT / "tests/samples/mnist", tmp_path / "RUN"))


def test_the_command_writes_a_folder_and_prints_the_difference(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(call("export", "RUN", "--out", "out", "--format=pt", *FEW)) == 0
    printed = capsys.readouterr().out
    assert printed == "out: export.json, model.pt\ngreatest difference from the model on a batch: 0\n"
    record = json.loads(Path("out/export.json").read_text())
    assert (record["format"], record["difference"], record["weights"]) == ("pt", 0.0, "step-00000050")
    assert sorted(path.name for path in Path().iterdir()) == ["RUN", "cache", "out"]


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("pt2", marks=pytest.mark.slow)])
def test_what_was_written_gives_the_same(run: Path, kind: str) -> None:
    typed = call("export", "RUN", *FEW)
    request = request_of(find_weights(*typed.source(), "export", typed.restate), Path("out"), kind)
    answer = export_model(request)
    assert answer["difference"] < 1e-5
    assert answer["files"] == ["export.json", f"model.{kind}"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "export what"),
        (["RUN"], "export RUN: --out"),
        (["RUN", "--out", "out", "--format", "pt3"], "--format pt3: --format pt"),
        (["RUN", "--out", "RUN"], "--out RUN: empty"),
        (["RUN", "--out", "model.pt"], "--out model.pt: --out model"),
        (["RUN", "--out", "none/out"], "--out none/out: missing"),
        (["NONE", "--out", "out"], "export NONE: no such"),
        (["RUN/checkpoints/step-00000050/model.safetensors", "--out", "out"], "model.safetensors: checkpoint"),
        (["RUN", "--out", "out", "--fromat=pt"], "export --fromat=pt: --format"),
    ],
)
def test_what_is_wrong_is_refused(run: Path, arguments: list[str], expected: str) -> None:
    with refused(expected):
        export(call("export", *arguments))
    assert not Path("out").exists()


def test_a_folder_without_a_run_or_without_a_checkpoint_is_named(run: Path) -> None:
    Path("empty").mkdir()
    for checkpoint in Path("RUN/checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    for folder, expected in (("empty", "export empty: weights"), ("RUN", "RUN/checkpoints: complete")):
        with refused(expected):
            export(call("export", folder, "--out", "out"))
        assert not Path("out").exists()


def test_onnx_names_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("--format onnx: ddpexp[onnx]"):
        export(call("export", "RUN", "--out", "out", "--format=onnx"))


@pytest.mark.slow
def test_an_onnx_model_takes_batches_of_any_size_and_gives_the_same(run: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs pip install 'ddpexp[onnx]'")
    assert export(call("export", "RUN", "--out", "out", "--format=onnx", *FEW)) == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["export.json", "model.onnx"]
    assert json.loads(Path("out/export.json").read_text())["difference"] < 1e-4
    session = runtime.InferenceSession("out/model.onnx", providers=["CPUExecutionProvider"])
    inputs = torch.rand(7, 1, 28, 28)
    [found] = session.run(None, {"inputs": inputs.numpy()})
    assert torch.allclose(torch.from_numpy(found), open_run("RUN").model()(inputs), atol=1e-4)


@pytest.mark.parametrize("batch", [torch.ones(2), (torch.ones(2), 0), [torch.ones(2)], {"inputs": torch.ones(2)}])
def test_the_inputs_of_a_batch(batch: Any) -> None:
    assert torch.equal(inputs_of(batch), torch.ones(2))


@pytest.mark.parametrize("batch", [{"pixels": torch.ones(2)}, ("text", 0), ()])
def test_a_batch_without_inputs_is_refused(batch: Any) -> None:
    with refused("compared"):
        inputs_of(batch)


def test_a_file_is_full_with_its_last_byte(tmp_path: Path) -> None:
    save_file({name: torch.zeros(2) for name in "abc"}, tmp_path / "model.safetensors")
    written = export_weights(tmp_path / "model.safetensors", tmp_path / "out", 16)
    assert [path.name for path in written] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip


def test_the_greatest_difference_is_that_of_all_outputs() -> None:
    one, other = [torch.zeros(2), torch.ones(3)], [torch.zeros(2), torch.tensor([1.0, 1.5, 1.0])]
    assert _difference(one, other) == 0.5
    with refused("other shapes"):
        _difference(one, other[:1])


def test_preprocessing_and_the_names_of_classes_go_with_the_model() -> None:
    data = {"name": "images", "mean": [0.5], "std": [0.2], "folder": "/x", "facts": {"classes": ["cat"], "other": 1}}
    assert described(data) == {"name": "images", "mean": [0.5], "std": [0.2], "classes": ["cat"]}


def test_the_columns_of_a_table_and_the_units_of_its_targets_go_with_the_model() -> None:
    facts = {"columns": ["area", "rooms"], "target_mean": [9.0], "target_std": [2.0], "shape": [2]}
    assert described({"name": "arrays", "facts": facts}) == {"name": "arrays", **facts}
    assert "target_mean" not in described({"name": "arrays", "facts": {**facts, "target_mean": None}})  # classes
