"""The package of docs/packages.md, installed as pip does it: its recipe, logger, launcher and schedule."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import ddpexp
from ddpexp import compose
from ddpexp.config.instantiate import Trust, locate
from tests.conftest import ROOT, Ddpexp, Done, finish, python_path
from tests.examples import install
from tests.listed import listed, unwrapped
from tests.points import wait_for
from tests.refusals import refused

PARTS = ("recipe=sides", "logger=[tensorboard,rows]", "launcher=shy", "scheduler=stable")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a package offers is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("package", tmp_path_factory.mktemp("package"))


def seeing(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": python_path(folder)}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str], installed: Path) -> Done:
    ddpexp = Ddpexp(tmp_path_factory.mktemp("packages"), environ)
    done = ddpexp(*PARTS, "trainer.gpus=2", environ=seeing(installed))
    assert (done.code, done.err) == (0, "")
    return done


def test_one_command_runs_with_all_of_its_parts(done: Done) -> None:
    records = [record for record in done.metrics() if "train/lr" in record]
    assert [record["step"] for record in records] == [5, 10, 15, 20]
    assert [round(record["train/lr"], 6) for record in records] == [0.05, 0.05, 0.03, 0.005]  # of optimizer.lr=0.05
    rows = [line.split(",") for line in (done.run / "rows.csv").read_text().splitlines()]
    expected = [(record["step"], name) for record in done.metrics() for name in record if "/" in name]
    assert [(int(step), name) for step, name, _ in rows] == expected
    assert len(list((done.run / "tb").iterdir())) == 1
    assert done.result()["metrics"]["eval/accuracy"] > 0.5
    code = json.loads((done.run / "manifest.json").read_text())["inputs"]["code"]
    assert "ddpexp_sides.stable.Stable" in code["targets"]  # of the names of entry points, too
    assert "ddpexp_sides.rows.Rows" not in code["targets"]  # how a run is recorded may change
    text = (done.run / "config.yaml").read_text()
    for line in ("_target_: rows", "_target_: shy", "_target_: stable", "_target_: ddpexp_sides.recipe.Net"):
        assert line in text


@pytest.mark.slow
def test_its_run_is_resumed_and_evaluated_with_it_and_refused_without(
    done: Done, ddpexp: Ddpexp, installed: Path
) -> None:
    again = ddpexp("evaluate", str(done.run), environ=seeing(installed))
    assert (again.code, again.err) == (0, "")
    longer = ddpexp("resume", str(done.run), "trainer.epochs=3", environ=seeing(installed))
    assert longer.code == 0, longer.err
    steps = [line.split(",")[0] for line in (done.run / "rows.csv").read_text().splitlines() if ",train/loss," in line]
    assert [int(step) for step in steps] == [5, 10, 15, 20, 25, 30]
    without = ddpexp("resume", str(done.run), "trainer.epochs=4")
    assert (without.code, without.err.count("\n")) == (2, 1)


def test_an_interrupted_run_is_resumed_without_naming_what_the_package_brings(ddpexp: Ddpexp, installed: Path) -> None:
    process, run = ddpexp.start("recipe=sides", "trainer.epochs=100000", environ=seeing(installed))
    wait_for(lambda: (run / "metrics.jsonl").is_file())
    process.send_signal(signal.SIGINT)
    stopped = finish(process, run)
    assert stopped.err.splitlines()[-1] == f"python -m ddpexp resume {run.name}"
    trusted = yaml.safe_load((run / "config.yaml").read_text())["run"]["trust"]
    assert sorted(trusted) == sorted(set(trusted))
    assert "ddpexp_sides.recipe.Sides" in trusted


def test_its_parts_are_listed_and_unknown_without_it(ddpexp: Ddpexp, installed: Path) -> None:
    shown = ddpexp("--help", *PARTS[:1], *PARTS[2:], environ=seeing(installed))
    lines = [line.split() for line in shown.out.splitlines()]
    assert f" {listed('recipe', 'sides', chosen='sides')} " in unwrapped(shown.out)
    assert " multi_step, onecycle, plateau, polynomial, stable*, torch, wsd " in unwrapped(shown.out)
    for line in (
        "launcher elastic, inline, mpi, shy*, slurm, spawn, torchrun-env",
        "logger csv, mlflow, none, rows, tensorboard*, wandb",
        "launcher.niceness=5 a whole number",
    ):  # fmt: skip
        assert line.split() in lines, shown.out
    for override in PARTS[2:]:
        with refused(f"{override}: option"):
            compose([override])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["recipe=side"], "recipe=side: recipe=sides?"),
        (["logger=row"], "logger=row: logger=rows?"),
        (["recipe=sides", "model.hidden=big"], "model.hidden=big: default is 8"),
        (["scheduler=stable", "scheduler.decay=a"], "scheduler.decay=a: default is 0.5"),
        # an entry point offers a part of its own group alone
        (
            ["logger=rows", "logger.rows._target_=ddpexp_sides.shy.Shy"],
            "logger.rows._target_=ddpexp_sides.shy.Shy: allowed",
        ),
        (["scheduler._target_=ddpexp_sides.rows.Rows"], "scheduler._target_=ddpexp_sides.rows.Rows: allowed"),
        (["scheduler._target_=rows"], "scheduler._target_=rows: allowed"),
    ],
)
def test_its_parts_are_checked_like_ours(
    see_packages: Callable[[Path], None], installed: Path, overrides: list[str], expected: str
) -> None:
    see_packages(installed)
    with refused(expected):
        compose(overrides)


def test_a_folder_that_hides_the_package_is_named(
    see_packages: Callable[[Path], None], installed: Path, done: Done, tmp_path: Path
) -> None:
    for metadata in installed.glob("*.dist-info"):  # all that an editable installation puts there
        shutil.copytree(metadata, tmp_path / metadata.name)
    (tmp_path / "ddpexp_sides").mkdir()
    see_packages(tmp_path)
    said = f"the folder {tmp_path}/ddpexp_sides for the installed package ddpexp_sides"
    for override in ("recipe=sides", "data._target_=ddpexp_sides.recipe.load"):
        with refused(f"{override}: {said}"):
            compose([override])
    with refused(f": {said}"):
        ddpexp.open_run(done.run).model()
    with refused(f"scheduler._target_=ddpexp_sides.stable.Stable: {said}"):
        locate("ddpexp_sides.stable.Stable", Trust(("ddpexp_sides",)), "scheduler")


def test_the_logger_of_the_documentation_records(ddpexp: Ddpexp, tmp_path: Path) -> None:
    text = (ROOT / "docs/loggers.md").read_text()
    [line] = [line.strip() for line in text.splitlines() if re.match("    python.* examples/rows/conf", line)]

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    small = " model=linear data.source=embedded data.embedded_train=640 data.embedded_test=100 trainer.max_steps=3"
    done = finish(ddpexp.paste(f"{line}{small} trainer.gpus=1 run.dir={tmp_path}/run", tmp_path), tmp_path / "run")
    assert done.code == 0, done.err
    assert (tmp_path / "run/rows.csv").read_text().startswith("3,train/loss,")
