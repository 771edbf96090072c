"""`ddpexp.open_run` and `ddpexp.open_sweep`: what directories hold, without trust in them."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

import ddpexp
from ddpexp.checkpoint.format import newest
from ddpexp.checkpoint.reader import weights_sha256
from ddpexp.checkpoint.tensors import read_tensors
from tests.cli.api.conftest import NOISY
from tests.conftest import ROOT
from tests.refusals import refused
from tests.sweep.made import Made
from tests.sweep.made import run as made_run

SAMPLES = ROOT / "tests/samples"


def listing(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_has_its_config_its_result_and_its_metrics(trained: ddpexp.Run) -> None:
    run = ddpexp.open_run(trained.path)
    assert run.path == trained.path
    assert (run.status, run.error) == ("done", None)
    assert run.config["trainer"]["seed"] == 3
    assert run.result["step"] == 8
    records = run.metrics(frame=False)
    assert [record["step"] for record in records if "train/loss" in record] == [2, 4, 6, 8]
    assert records[-1]["eval/loss"] == run.result["metrics"]["eval/loss"]


def test_metrics_are_a_frame_where_pandas_is(trained: ddpexp.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert trained.metrics() == trained.metrics(frame=False)
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        trained.metrics(frame=True)
    # pandas itself is too large a package to be installed for one line.
    fake = types.ModuleType("pandas")
    fake.DataFrame = lambda rows: ("frame", rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert trained.metrics() == ("frame", trained.metrics(frame=False))


def test_metrics_that_are_not_finite_are_nan(trained: ddpexp.Run, tmp_path: Path) -> None:
    copy = shutil.copytree(trained.path, tmp_path / "copy")
    (copy / "metrics.jsonl").write_text('{"step": 1, "train/loss": null}\n{"step": 2, "tra')
    [record] = ddpexp.open_run(copy).metrics(frame=False)
    assert (record["step"], math.isnan(record["train/loss"])) == (1, True)


def test_a_damaged_line_of_the_metrics_is_left_out_with_a_warning(tmp_path: Path) -> None:
    copy = shutil.copytree(SAMPLES / "finished", tmp_path / "copy")
    lines = ['{"step": 1}', '{"step": 2, "tr', '{"step": 3}', "", "\0\0", '{"step": 4}', '{"step": 5, "tr']
    (copy / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.warns(UserWarning, match=r"copy/metrics\.jsonl, lines 2, 5: damaged, so left out") as caught:
        found = ddpexp.open_run(copy).metrics(frame=False)
    assert [record["step"] for record in found] == [1, 3, 4]
    assert [warning.filename for warning in caught] == [__file__]


def test_a_run_is_shown_with_its_status_and_its_metrics(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", ["recipe=points"])
    run = ddpexp.Run(path, "conf", ("mine",))
    assert repr(run) == f"Run({str(path)!r}, status='done', metrics={{'eval/loss': 0.5}})"
    (path / "metrics.jsonl").unlink()
    (path / "result.json").write_text("[")
    assert repr(run) == f"Run({str(path)!r}, status='broken')"


def test_a_missing_config_is_refused_with_the_command_that_restores_it(
    trained: ddpexp.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(trained.path, tmp_path / "copy")
    (copy / "config.yaml").unlink()
    with pytest.raises(ddpexp.RefusedError) as caught:
        ddpexp.open_run(copy)
    assert str(caught.value) == (
        f"{copy}: Its config.yaml is missing. Its newest checkpoint holds a copy: "
        "cp copy/checkpoints/step-00000008/config.yaml copy/config.yaml"
    )


def test_the_checkpoints_say_which_is_the_best(trained: ddpexp.Run, tmp_path: Path) -> None:
    assert [(one.step, one.is_best, one.is_complete) for one in trained.checkpoints] == [
        (4, True, True),
        (8, False, True),
    ]
    assert trained.checkpoints[0].metrics["eval/loss"] > trained.checkpoints[1].metrics["eval/loss"]
    copy = shutil.copytree(trained.path, tmp_path / "copy")
    (copy / "checkpoints/step-00000004/model.safetensors").write_bytes(b"")
    (copy / "checkpoints/step-00000008/checkpoint.json").write_bytes(b"{}")
    found = ddpexp.open_run(copy).checkpoints
    assert [(one.step, one.is_complete) for one in found] == [(4, False), (8, False)]


def test_a_model_has_the_weights_of_the_checkpoint_that_is_named(trained: ddpexp.Run) -> None:
    last = newest(trained.path / "checkpoints")
    assert last is not None
    state = torch.get_rng_state()
    raw = trained.model("last", weights="raw")
    assert not raw.training
    assert weights_sha256({"model": raw}) == trained.result["weights_sha256"]
    average = read_tensors(last.folder / "model.ema.safetensors")
    for model in (trained.model("last"), trained.model("last", "ema"), trained.model(8), trained.model("step-8")):
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in average.items())
    best = trained.model("best", weights="raw")
    assert weights_sha256({"model": best}) != trained.result["weights_sha256"]
    for name in ("auto", 4, "step-00000004"):
        assert torch.equal(best.weight, trained.model(name, weights="raw").weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert raw(torch.zeros(2, 5)).shape == (2, 1)


def test_weights_go_into_a_module_of_ones_own(trained: ddpexp.Run) -> None:
    run = ddpexp.open_run(trained.path)  # without trust: nothing of the run's code is needed
    module = run.load_into(torch.nn.Linear(5, 1), "last", weights="raw")
    assert weights_sha256({"model": module}) == trained.result["weights_sha256"]
    with refused(": another model"):
        run.load_into(torch.nn.Linear(4, 1))
    with refused("str: torch.nn.Module"):
        run.load_into("model")


@pytest.mark.usefixtures("surroundings")
def test_an_evaluation_gives_the_metrics_of_the_run(trained: ddpexp.Run) -> None:
    before = listing(trained.path)
    assert trained.evaluate(checkpoint="last") == trained.result["metrics"]
    assert trained.evaluate() == trained.evaluate(checkpoint="best") == trained.checkpoints[0].metrics
    assert listing(trained.path) == before


def test_code_of_a_run_is_trusted_only_when_it_is_restated(trained: ddpexp.Run) -> None:
    run = ddpexp.open_run(trained.path)
    with pytest.raises(ddpexp.RefusedError) as caught:
        run.model()
    assert f"ddpexp.open_run({str(trained.path)!r}, config_dir={os.path.relpath(NOISY)!r})" in str(caught.value)
    assert ddpexp.open_run(trained.path, config_dir=NOISY).model().training is False


@pytest.mark.parametrize(
    ("checkpoint", "weights", "expected"),
    [
        (5, None, ": 8, 4"),
        ("newest", None, "checkpoint: best"),
        ("last", "average", "weights=average: 'raw', 'ema'"),
    ],
)
def test_a_checkpoint_that_there_is_not_is_refused(
    trained: ddpexp.Run, checkpoint: int, weights: None, expected: str
) -> None:
    with refused(expected):
        trained.model(checkpoint, weights)


def test_a_run_without_a_best_checkpoint_or_an_average_says_so() -> None:
    run = ddpexp.open_run(SAMPLES / "mnist")
    with refused(": best"):
        run.model("best")
    with refused("weights=ema: weights='raw'"):
        run.model(weights="ema")


def test_a_run_of_an_older_version_opens() -> None:
    run = ddpexp.open_run(SAMPLES / "finished", config_dir=SAMPLES / "project/conf")
    checkpoint = newest(run.path / "checkpoints")
    assert checkpoint is not None
    state, expected = run.model(weights="raw").state_dict(), read_tensors(checkpoint.folder / "model.safetensors")
    assert run.status == "done"
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_strangers_directory_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.yaml").write_text("a: 1")
    Made(tmp_path / "sweep").job("optimizer.lr=0.1")
    before = listing(tmp_path)
    for name, word in (
        ("nowhere", "no such"),
        ("empty", "not a run"),
        ("other", "not a run"),
        ("other/config.yaml", "not a run"),
        ("sweep", "ddpexp.open_sweep"),
    ):
        with refused(f"{tmp_path / name}: {word}"):
            ddpexp.open_run(tmp_path / name)
    assert listing(tmp_path) == before


def test_a_damaged_directory_is_one_sentence_each(trained: ddpexp.Run, tmp_path: Path) -> None:
    copy = shutil.copytree(trained.path, tmp_path / "copy")
    run = ddpexp.open_run(copy, config_dir=NOISY)
    (copy / "result.json").write_text("[")
    with refused(": damaged"):
        _ = run.result
    assert run.status == "broken"
    (copy / "config.yaml").write_text("a: [")
    with refused(": newest checkpoint"):
        _ = run.config
    with refused(": newest checkpoint"):
        run.model()
    shutil.copy(trained.path / "config.yaml", copy)
    weights = copy / "checkpoints/step-00000008/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="step-00000008 is damaged and not used: .*; the weights are of step 4"):
        model = run.model("last", weights="raw")
    assert torch.equal(model.weight, trained.model(4, "raw").weight)
    with refused(": hash"):
        run.model(8, "raw")
    shutil.copy(trained.path / "checkpoints/step-00000008/model.safetensors", weights)
    best = copy / "checkpoints/step-00000004/model.safetensors"
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="step-00000004, the best one, is damaged and not used"):
        model = run.model(weights="raw")
    assert torch.equal(model.weight, trained.model(8, "raw").weight)
    shutil.rmtree(copy / "checkpoints")
    with refused(": complete"):
        run.model()


def test_a_sweep_has_rows_runs_and_the_best(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    first = made.job("optimizer.lr=0.1")
    second = made.job("optimizer.lr=0.2", points=((10, 0.1),))
    made.job("optimizer.lr=0.3", status=None, events=())
    sweep = ddpexp.open_sweep(made.path, trust="mine")
    assert [(row["overrides"]["optimizer.lr"], row["status"]) for row in sweep.rows()] == [
        ("0.1", "done"), ("0.2", "done"), ("0.3", "waiting"),
    ]  # fmt: skip
    json.dumps(sweep.rows())
    assert [run.path for run in sweep.runs] == [first, second]
    assert sweep.best == ddpexp.Run(second, None, ("mine",))


def test_a_sweep_without_an_objective_or_a_value_has_no_best(tmp_path: Path) -> None:
    with refused("plain: objective"):
        _ = ddpexp.open_sweep(Made(tmp_path / "plain", objective=None).path).best
    with refused("new: eval/loss"):
        _ = ddpexp.open_sweep(Made(tmp_path / "new").path).best
    with refused("finished: ddpexp.open_run"):
        ddpexp.open_sweep(SAMPLES / "finished")


@pytest.mark.usefixtures("surroundings")
def test_a_run_is_trained_again_with_what_it_trusts(trained: ddpexp.Run, tmp_path: Path) -> None:
    before = listing(trained.path)
    other = trained.rerun(["run.dir=other"], exact=True, cwd=tmp_path, quiet=True)
    assert (other.path, other.status, other.config_dir) == (tmp_path / "other", "done", trained.config_dir)
    assert other.result["weights_sha256"] == trained.result["weights_sha256"]
    with refused("--exact: trainer.seed 3 -> 4"):
        trained.rerun(["trainer.seed=4", "run.dir=third"], exact=True, cwd=tmp_path, quiet=True)
    assert listing(trained.path) == before
