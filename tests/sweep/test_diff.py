"""`ddpexp diff`: what runs differ in, with their results beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import ddpexp
from ddpexp.cli.diff import diff, runs_of
from ddpexp.config.keys import MISSING
from ddpexp.run.manifest import accepted
from ddpexp.sweep.diff import compare_runs
from ddpexp.system.files import sha256
from tests.conftest import ROOT
from tests.refusals import refused
from tests.typed import call

SAMPLES = ROOT / "tests/samples"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def copy(sample: str, name: str) -> Path:
    return Path(shutil.copytree(SAMPLES / sample, name))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def resumed(run: Path, **world: Any) -> Path:
    """Have a run been resumed with another rate, by another number of workers."""
    text = (run / "config.yaml").read_text()
    (run / "config-1.yaml").write_text(text)
    tree = yaml.safe_load(text)
    tree["optimizer"]["lr"] = 0.5
    new = yaml.safe_dump(tree)
    (run / "config.yaml").write_text(new)
    manifest = json.loads((run / "manifest.json").read_text())
    inputs = manifest["inputs"]
    earlier = {"started": manifest["started"], "inputs": {**inputs, "config_sha256": sha256(text)}}
    change(
        run / "manifest.json",
        started="2036-11-27T00:00:00.000000+0000",  # after all that was recorded
        inputs={**inputs, "config_sha256": sha256(new)},
        config=accepted(new),
        world={**manifest["world"], **world},
        earlier=[{**earlier, "world": manifest["world"]}],
    )
    return run


def test_runs_that_differ_in_nothing_are_equal_with_their_weights(capsys: pytest.CaptureFixture[str]) -> None:
    copy("finished", "a"), copy("finished", "b")
    compared = compare_runs([Path("a"), Path("b")])
    assert (compared.groups(), compared.has_equal_weights) == ({}, True)
    assert diff(call("diff", "a", "b")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "nothing differs in configuration, code, versions, data, machine and starts",
        "the weights of all are equal, to the bit",
    ]


def test_a_value_that_has_changed_on_a_resume_is_shown_with_its_steps() -> None:
    copy("finished", "a"), resumed(copy("finished", "b"), world_size=1)
    compared = compare_runs([Path("a"), Path("b")])
    groups = compared.groups()
    assert groups["configuration"] == {"optimizer.lr": [0.02, "0.02 -> 0.5 at about 12"]}
    assert groups["machine"] == {"world_size": [2, 1]}
    assert groups["starts"] == {
        "starts": [1, 2],
        "resumed after step": [MISSING, "about 12"],
        "changed": [MISSING, "world_size 2 -> 1 after about step 12"],
    }
    [record, *_] = [record for record in ddpexp.diff(["a", "b"]) if record["key"] == "optimizer.lr"]
    assert record == {"group": "configuration", "key": "optimizer.lr", "a": 0.02, "b": "0.02 -> 0.5 at about 12"}
    results = {record["key"]: record["b"] for record in ddpexp.diff(["a", "b"]) if record["group"] == "results"}
    assert (results["status"], results["step"], results["eval/accuracy"]) == ("done", 12, 0.075)


def test_runs_that_were_killed_are_compared_and_unreadable_ones_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    copy("finished", "a"), copy("mnist", "killed"), copy("finished", "damaged"), copy("finished", "lost")
    Path("damaged/manifest.json").write_text("{")
    Path("lost/manifest.json").unlink()
    assert diff(call("diff", "a", "killed", "damaged", "lost")) == 0
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith("  model._target_")]
    assert line.split() == [
        "model._target_",
        "mine.Net",
        "ddpexp.recipes.mnist.Linear",
        *"cannot be read mine.Net".split(),
    ]
    assert "damaged: damaged/manifest.json is damaged and cannot be read" in out
    assert "lost has no record of its code, versions, machine" in out
    assert "the weights" not in out


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    copy("finished", "a"), resumed(copy("finished", "b"))
    assert diff(call("diff", "a", "b", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"]["configuration"] == {"optimizer.lr": [0.02, "0.02 -> 0.5 at about 12"]}
    assert found["equal_weights"] is True
    [_, run] = found["runs"]
    assert [start["after"] for start in run["starts"]] == [0, 12]
    assert [value["value"] for value in run["over_steps"]["optimizer.lr"]] == [0.02, 0.5]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], "diff a: two runs"),
        (["a", "a"], "diff a a: each named once"),
        (["a", "b"], "diff b: no such directory"),
        (["a", "trainer.seed=1"], "diff: Leave trainer.seed=1 out"),
        (["a", "empty"], "diff empty: is not a run directory"),
    ],
)
def test_two_runs_are_named_or_more(words: list[str], expected: str) -> None:
    copy("finished", "a"), copy("sweep", "sweep")
    Path("empty").mkdir()
    with refused(expected):
        runs_of(words, "diff")


def test_a_sweep_stands_for_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    copy("finished", "a"), copy("sweep", "sweep")
    jobs = [Path("sweep/0000_optimizer.lr=0.01"), Path("sweep/0001_optimizer.lr=0.1")]
    assert runs_of(["sweep"], "diff") == jobs
    assert [path.name for path in runs_of(["a", "sweep"], "diff")] == ["a", *(job.name for job in jobs)]
    assert len(runs_of([str(jobs[0]), "sweep"], "diff")) == 2  # a job that is named too counts once
    monkeypatch.setattr("ddpexp.cli.diff._COLUMNS", 2)
    with refused("diff a sweep: ddpexp table a sweep"):
        diff(call("diff", "a", "sweep"))
