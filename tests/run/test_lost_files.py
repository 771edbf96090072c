"""A run directory whose files were emptied, cut off or removed: what is lost is named, and nothing is lost silently."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from ddpexp.errors import FinishedError, RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.run.resume import Start, inspect
from tests.conftest import ROOT, SMALL, Ddpexp, Done
from tests.refusals import command_refused

LOGGED = (*SMALL[:-1], "logger=[tensorboard,csv]", "trainer.checkpoint_every=5", "launcher=inline")
ENDED = r"^run is finished at step 10 \(eval/accuracy [\d.]+%\)"


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What of a directory counts is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Done:
    """One run, which tests copy."""
    done = Ddpexp(tmp_path_factory.mktemp("finished"), environ)(*LOGGED)
    assert done.code == 0, done.err
    return done


@pytest.fixture
def run(finished: Done, tmp_path: Path) -> RunDir:
    """A copy of the finished run, as `run` in the current folder of the command."""
    return RunDir(shutil.copytree(finished.run, tmp_path / "run"))


def inspected(run: RunDir) -> str:
    """Return what is said of the run, finished or not, when it is resumed as it is."""
    text = run.config.read_text() if run.config.is_file() else "{}"
    try:
        return "; ".join(inspect(run, Start("run", text, ())).notes)
    except (FinishedError, RefusedError) as error:
        return f"{error}"


def unfinished(run: RunDir) -> None:
    """Make of the finished run one that was interrupted after step 5."""
    shutil.rmtree(run.checkpoints / "step-00000010")
    run.result.write_text(json.dumps({**json.loads(run.result.read_text()), "status": "interrupted", "step": 5}))


def shorten(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2 if how == "half" else 0)


@pytest.mark.parametrize(
    ("name", "how", "fact"),
    [
        ("metrics.jsonl", "empty", r"metrics\.jsonl is empty"),
        ("metrics.jsonl", "half", r"metrics\.jsonl has [\d,]+ of its [\d,]+ bytes"),
        ("metrics.jsonl", "gone", r"metrics\.jsonl is missing"),
        ("csv/eval.csv", "half", r"csv/eval\.csv has [\d,]+ of its [\d,]+ bytes"),
        ("tb/events*", "empty", r"tb/events\S+ is empty"),
        ("manifest.json", "gone", r"manifest\.json is missing"),
        ("overrides.yaml", "empty", r"overrides\.yaml is damaged"),
        ("overrides.yaml", "half", r"overrides\.yaml is (damaged|cut off)"),
        ("overrides.yaml", "gone", r"overrides\.yaml is missing"),
    ],
)
def test_a_finished_run_names_the_files_it_has_lost_and_those_it_has(
    run: RunDir, name: str, how: str, fact: str
) -> None:
    assert re.fullmatch(rf"{ENDED}: nothing to do\.", inspected(run))
    shorten(next(run.path.glob(name)), how)
    assert re.search(
        rf"{ENDED}, and has lost files since: {fact}\. What is left: the checkpoint of step 10 and the metrics of the "
        r"last evaluation in result\.json\. Restore copies of them, or train again with another run\.dir",
        inspected(run),
    )


def test_the_command_of_a_finished_run_that_has_lost_its_metrics_fails(ddpexp: Ddpexp, run: RunDir) -> None:
    shorten(run.metrics, "empty")
    before = run.result.read_bytes()
    for command in ([*LOGGED, "run.dir=run"], ["resume", "run"]):
        subject = "run" if command[0] == "resume" else "run.dir=run"
        command_refused(ddpexp(*command), f"{subject}: metrics.jsonl is empty")
    assert run.result.read_bytes() == before


@pytest.mark.parametrize("how", ["empty", "gone"])
def test_without_checkpoints_a_finished_run_still_misses_its_metrics(run: RunDir, how: str) -> None:
    shutil.rmtree(run.checkpoints)
    assert inspected(run).endswith("nothing to do.")
    shorten(run.metrics, how)
    assert re.search(r"metrics\.jsonl is (empty|missing)\. What is left: the metrics of the last", inspected(run))


def test_records_of_loggers_that_were_removed_are_named_but_the_run_stays_finished(run: RunDir) -> None:
    shutil.rmtree(run.path / "csv")
    assert re.search(
        r"nothing to do\. Since then csv/eval\.csv, csv/memory\.csv, csv/times\.csv, csv/train\.csv were removed\.$",
        inspected(run),
    )


def test_a_run_that_is_made_longer_is_not_refused_for_what_it_has_lost(run: RunDir) -> None:
    shorten(run.metrics, "empty")
    text = run.config.read_text().replace("max_steps: 10", "max_steps: 15").replace("epochs: 2", "epochs: 3")
    assert inspect(run, Start("run", text, ["trainer.max_steps=15", "trainer.epochs=3"])).changes


def test_a_run_of_an_older_version_has_lost_nothing(tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "run"))
    assert inspected(run).endswith("nothing to do.")


@pytest.mark.slow
def test_an_unfinished_run_resumes_and_its_log_names_what_it_has_lost(ddpexp: Ddpexp, run: RunDir) -> None:
    unfinished(run)
    assert inspected(run) == ""
    shorten(run.manifest, "gone")
    shorten(run.overrides, "empty")
    os.truncate(run.metrics, run.metrics.stat().st_size // 8)
    shutil.rmtree(run.path / "csv")
    done = ddpexp("resume", "run")
    assert done.code == 0, done.err
    for line in (
        "manifest.json is missing: what it recorded of the earlier starts is lost",
        "overrides.yaml is damaged: what it recorded of the earlier starts is lost",
        "metrics.jsonl is shorter than at the checkpoint: some of its records are lost",
        "csv/eval.csv is missing: its records up to the checkpoint are lost",
    ):
        assert line in run.log.read_text()


@pytest.mark.variants(1)
@pytest.mark.parametrize("how", ["empty", "half", "gone"])
def test_a_damaged_result_says_what_to_do_and_that_works(ddpexp: Ddpexp, run: RunDir, how: str) -> None:
    before = json.loads(run.result.read_text())
    shorten(run.result, how)
    if how != "gone":
        assert inspected(run).endswith("Remove it, and resume: the run writes it again when it ends.")
        run.result.unlink()
    assert ddpexp("resume", "run").code == 0
    after = json.loads(run.result.read_text())
    assert [after[key] for key in ("status", "step", "metrics", "weights_sha256")] == [
        before[key] for key in ("status", "step", "metrics", "weights_sha256")
    ]


@pytest.mark.parametrize("how", ["empty", "half"])
def test_a_damaged_manifest_says_what_to_do(run: RunDir, how: str) -> None:
    shorten(run.manifest, how)
    assert "Put a copy back, or remove it, and with it what it recorded of the starts" in inspected(run)


@pytest.mark.parametrize("lost", [("config.yaml",), ("config.yaml", "manifest.json", "lock")])
def test_the_command_of_a_run_without_its_configuration_says_where_a_copy_is(
    ddpexp: Ddpexp, run: RunDir, lost: tuple[str, ...]
) -> None:
    for name in lost:
        (run.path / name).unlink()
    done = ddpexp(*LOGGED, "run.dir=run")
    command_refused(done, "run.dir=run: config.yaml is missing")
    assert done.err.endswith(" cp run/checkpoints/step-00000010/config.yaml run/config.yaml\n")


def test_a_damaged_configuration_says_where_a_copy_is_or_that_there_is_none(run: RunDir) -> None:
    text = run.config.read_text()
    shorten(run.config, "empty")

    def said() -> str:
        with pytest.raises(RefusedError) as caught:
            inspect(run, Start("run", text, ()))
        return str(caught.value)

    assert "is not the configuration of a run. Its newest checkpoint holds a copy: cp " in said()
    for copy in run.checkpoints.glob("*/config.yaml"):
        copy.unlink()
    assert said().endswith("No checkpoint holds a copy: put one back, or start a new run with another run.dir.")
