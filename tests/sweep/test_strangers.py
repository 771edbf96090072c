"""Sweeps that somebody else has made: their words run no code, and nothing leads out of their directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ddpexp.run.directory import RunDir
from ddpexp.sweep.files import curve
from ddpexp.sweep.folder import SweepDir, runs_code
from ddpexp.sweep.resume import resumed
from tests.conftest import SMALL, finish
from tests.refusals import refused
from tests.sweep.conftest import Sweeps

WORDS = (*SMALL, "trainer.gpus=1", "trainer.seed=0,1", "sweep.slots=2", "sweep.picture=false")


def given(path: Path, *overrides: str) -> SweepDir:
    """Make a sweep's directory as somebody else could have left it."""
    folder = SweepDir(path)
    path.mkdir()
    folder.command.write_text(yaml.safe_dump({"words": list(overrides), "options": []}))
    folder.record.write_text('{"event": "sweep", "time": 1}\n')
    return folder


@pytest.mark.fault("S4")
@pytest.mark.parametrize("split", [True, False])
def test_an_option_among_the_overrides_of_a_sweep_does_not_choose_the_code(
    sweeps: Sweeps, tmp_path: Path, split: bool
) -> None:
    conf = sweeps.recipe.folder / "conf"
    (sweeps.recipe.folder / "points.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    option = ["--config-dir", str(conf)] if split else [f"--config-dir={conf}"]
    folder = given(tmp_path / "theirs", *option, "recipe=points", "trainer.seed=0,1")
    done = sweeps.again(folder.path, trusted=False)
    assert done.code == 2
    assert "is not an override" in done.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.fault("S4")
@pytest.mark.parametrize(
    "word",
    [
        "run.trust=[os]", "++run.trust=[os]", "run={trust:[os]}", "launcher.setup=[id]", "launcher={setup:[id]}",
        "+launcher.x=1",
        "+scheduler@launcher=../../theirs", "launcher=../../theirs", "recipe=mnist,../../theirs",
        "launcher=${oc.env:PWD}",
        "hydra.sweeper.params.run.trust=[os]", "hydra.sweeper.storage=sqlite:///x", "hydra/sweeper=../../theirs",
        "+hydra.x=1",
        "hydra.searchpath=[file:///x]", "launcher=slurm", "launcher=spawn,slurm", "+launcher=slurm",
        "run.init_from=x.safetensors",
        "++run.init_from=x", "hydra.sweeper.params.launcher=slurm", "hydra.sweeper.params.run.init_from=a,b",
    ],
)  # fmt: skip
def test_overrides_that_say_what_runs_and_where_and_from_which_weights_must_be_restated(word: str) -> None:
    assert runs_code(word)


@pytest.mark.parametrize(
    "word",
    [
        "recipe=mnist", "optimizer=adamw,mnist_sgd", "model=glob(*)", "run.resume=never", "optimizer.lr=0.1,0.2",
        "+model.x=1",
        "data.root=/data/mnist", "logger.token=${oc.env:TOKEN}", "trainer.seed=range(3)", "hydra.sweep.dir=here",
        "~model.bias",
        "hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.n_trials=4",
        "hydra.sweeper.params.model.x=1,2",
    ],
)  # fmt: skip
def test_overrides_that_only_say_what_is_trained_need_no_restating(word: str) -> None:
    assert not runs_code(word)


@pytest.mark.fault("S4")
def test_of_a_key_that_is_restated_nothing_else_counts(tmp_path: Path) -> None:
    folder = given(tmp_path / "theirs", *WORDS, "run.trust=[theirs]", "run.trust=[os]")
    swept = resumed([str(folder.path), "run.trust=[mine]"], ["ddpexp", "resume", str(folder.path), "run.trust=[mine]"])
    assert [word for word in swept.overrides if "trust" in word] == ["run.trust=[mine]"]
    with refused("theirs"):
        resumed([str(folder.path)], ["ddpexp", "resume", str(folder.path)])


@pytest.mark.fault("S4")
@pytest.mark.parametrize("word", ["launcher=slurm", "run.init_from=/home/me/secret.safetensors"])
def test_how_a_sweep_of_others_starts_its_jobs_and_from_which_weights_is_restated(
    sweeps: Sweeps, tmp_path: Path, word: str
) -> None:
    folder = given(tmp_path / "theirs", *WORDS, word)
    done = sweeps.again(folder.path, trusted=False)
    assert done.code == 2
    assert f"weights, connections or the environment ({word})" in done.err
    assert done.err.endswith(f" {word}\n")
    assert not (tmp_path / "theirs/logs").exists()
    arguments = resumed([str(folder.path), word], ["ddpexp", "resume", str(folder.path), word])
    assert [one for one in arguments.overrides if one == word] == [word]


def test_what_one_start_of_a_sweep_was_allowed_must_be_restated(tmp_path: Path) -> None:
    folder = given(tmp_path / "mine", *WORDS, "run.allow_changes=[code]")
    arguments = [str(folder.path)]
    assert "run.allow_changes=[code]" not in resumed(arguments, ["ddpexp", "resume", *arguments]).overrides
    swept = resumed(
        [*arguments, "run.allow_changes=[data]"], ["ddpexp", "resume", *arguments, "run.allow_changes=[data]"]
    )
    assert [word for word in swept.overrides if "allow" in word] == ["run.allow_changes=[data]"]


def _logs(path: Path, outside: Path) -> None:
    (path / "logs").symlink_to(outside)


def _log(path: Path, outside: Path) -> None:
    (path / "logs").mkdir()
    (path / "logs" / "0000.log").symlink_to(outside / "kept")


def _pipe(path: Path, outside: Path) -> None:
    (path / "logs").mkdir()
    os.mkfifo(path / "logs" / "0000.log")


def _multirun(path: Path, outside: Path) -> None:
    (path / "multirun.yaml").symlink_to(outside / "kept")


def _record(path: Path, outside: Path) -> None:
    (path / "sweep.jsonl").rename(outside / "record")
    (path / "sweep.jsonl").symlink_to(outside / "record")


def _job(path: Path, outside: Path) -> None:
    (path / "0000_trainer.seed=0").symlink_to(outside)


def _huge(path: Path, outside: Path) -> None:
    os.truncate(path / "sweep.jsonl", 1 << 38)


@pytest.mark.fault("S16")
@pytest.mark.parametrize("made", [_logs, _log, _pipe, _multirun, _record, _job, _huge])
def test_what_leads_out_of_a_sweep_or_has_no_end_is_refused(
    sweeps: Sweeps, tmp_path: Path, made: Callable[[Path, Path], None]
) -> None:
    folder = given(tmp_path / "theirs", *WORDS)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    made(folder.path, outside)
    done = sweeps.again(folder.path, trusted=False)
    assert done.code == 2
    assert "Remove it, or copy it without its links." in done.err or "bytes, more than" in done.err
    assert {path.name for path in outside.iterdir()} <= {"kept", "record"}
    assert (outside / "kept").read_text() == "mine"


@pytest.mark.fault("S17")
def test_what_a_job_of_others_has_recorded_holds_nobody_up(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = given(tmp_path / "theirs", *WORDS, "sweep.objective=train/loss")
    events = [
        {
            "event": "planned",
            "time": 1,
            "job": job,
            "name": "0_",
            "overrides": ["trainer.seed=0" if job != 1 else "trainer.seed=1"],
        }
        for job in (10**4000, -1, 0, 1)
    ]
    deep = f'{{"event": "planned", "job": 5, "overrides": {"[" * 900}{"]" * 900}}}'
    ended = '{"event": "ended", "job": 1, "status": ["done"]}'
    folder.record.write_text("\n".join([*map(json.dumps, events), deep, ended, ""]))
    job = RunDir(folder.path / "0000_trainer.seed=0")
    job.path.mkdir()
    job.config.write_text("run: {}\n")
    job.manifest.write_text('{"format": 1}')
    job.result.write_text('{"status": "done", "step": 10, "metrics": {}}')
    os.mkfifo(job.metrics)
    status, _ = sweeps.recipe.ddpexp.start("status", str(folder.path))
    assert finish(status, folder.path).code == 0
    done = sweeps.again(folder.path, trusted=False)
    assert done.code == 0, done.err
    assert sorted(path.name for path in folder.path.glob("0*")) == [job.path.name, "0001_trainer.seed=1"]


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e999, "eval/loss": 1}',
        '{"step": 1, "eval/loss": ' + "9" * 400 + "}",
        '{"eval/loss": ' + "[" * 100_000,
    ],
)
def test_a_record_that_no_run_writes_is_no_point_of_a_curve(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 2, "eval/loss": 0.5}}\n')
    assert curve(path, "eval/loss") == [(2, 0.5)]


@pytest.mark.parametrize(
    "overrides", [["trainer.seed=range(100000000000)"], ["trainer.seed=range(1000)", "optimizer.lr=range(0.1,99,0.1)"]]
)
def test_a_grid_larger_than_memory_is_refused_at_once(sweeps: Sweeps, overrides: list[str]) -> None:
    done = sweeps(*overrides)
    assert done.code == 2
    assert f"{overrides[-1]} makes this a sweep of more than 10,000 jobs" in done.err
    assert not done.path.exists()
