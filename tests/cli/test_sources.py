"""What `resume`, `evaluate`, `table`, `plan` and `help` answer to an argument that names something else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpexp.checkpoint.weights import check_usable
from ddpexp.cli.evaluate import evaluate
from ddpexp.cli.help import answer
from ddpexp.cli.resume import resume
from ddpexp.errors import RefusedError
from ddpexp.sweep.arguments import Arguments
from tests.conftest import PATIENCE, ROOT, python_path
from tests.typed import call


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five runs, as far as their directories show, in outputs/mnist."""
    for number in range(5):
        run = tmp_path / f"outputs/mnist/{number}"
        run.mkdir(parents=True)
        for name in ("config.yaml", "manifest.json", "metrics.jsonl"):
            (run / name).write_text("{}")
        os.utime(run / "manifest.json", (number, number))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(work: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        work(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("folder", ["outputs", "outputs/mnist"])
@pytest.mark.parametrize(("name", "work"), [("resume", resume), ("evaluate", evaluate)])
def test_for_a_folder_of_runs_the_error_names_the_newest(
    outputs: Path, name: str, work: Callable[..., Any], folder: str
) -> None:
    assert refused(work, call(name, folder)) == (
        f"{name} {folder}: it is no run directory. Runs in it: outputs/mnist/4, outputs/mnist/3, outputs/mnist/2 and "
        "2 more."
    )


SOURCES = [
    ("evaluate run.dir=good", "the run is named without a key. Did you mean evaluate good?"),
    ("resume run.dir=good", "the run is named without a key. Did you mean resume good?"),
    ("evaluate outputs/mnist/1/config.yaml", "this file holds no weights. Did you mean outputs/mnist/1?"),
    ("evaluate outputs/mnist/1 outputs/mnist/2", "it takes one directory or file: type a command for each."),
    ("resume outputs/mnist/1 outputs/mnist/2", "it takes one directory or file: type a command for each."),
]


@pytest.mark.parametrize(("typed", "says"), SOURCES)
def test_for_a_run_named_another_way_the_error_gives_its_name(outputs: Path, typed: str, says: str) -> None:
    name, *overrides = typed.split()
    assert refused({"evaluate": evaluate, "resume": resume}[name], call(name, *overrides)) == f"{typed}: {says}"


@pytest.mark.parametrize(
    ("option", "meant"), [("--splt", "--split"), ("--splits=eval", "--split"), ("--jsn", "--json")]
)
def test_a_misspelt_option_of_evaluate_is_refused_with_the_right_one(option: str, meant: str) -> None:
    said = refused(call, "evaluate", "outputs/mnist/1", option, "eval")
    assert said == f"evaluate {option}: no such option. Did you mean {meant}?"


def test_a_checkpoint_is_named_by_its_folder() -> None:
    said = refused(call, "evaluate", "outputs/mnist/1", "--checkpoint", "best")
    assert said.startswith("evaluate --checkpoint: no such option. A checkpoint is named by its folder, as in ddpexp ")


PLANS = [
    (["recipe=mnist", "--nodes", "2"], "plan --nodes is not an option. Did you mean trainer.nodes=2?"),
    (["--gpus=4"], "plan --gpus=4 is not an option. Did you mean trainer.gpus=4?"),
    (["--batch-size", "2"], "plan --batch-size is not an option. Did you mean trainer.global_batch_size"),
    (["--jason"], "plan --jason is not an option. Did you mean --json?"),
    (["outputs/mnist/1"], "plan outputs/mnist/1: The command takes key=value"),
]


@pytest.mark.parametrize(("overrides", "sentence"), PLANS)
def test_what_a_plan_does_not_accept_is_refused(outputs: Path, overrides: Sequence[str], sentence: str) -> None:
    assert refused(call, "plan", *overrides).startswith(sentence)


def test_what_a_table_does_not_accept_is_refused(outputs: Path) -> None:
    assert refused(Arguments.of, ["outputs/mnist/1/metrics.jsonl"], {}) == (
        "outputs/mnist/1/metrics.jsonl is a file. Name the directory of a run or a sweep, such as outputs/mnist/1."
    )
    assert refused(call, "table", "outputs", "--sort", "x").startswith(
        "table --sort: no such option. The rows are sorted by sweep.objective=METRIC"
    )


def test_for_an_option_behind_its_group_the_error_gives_both_in_one_argument() -> None:
    said = refused(answer, ["launcher", "slurm"], True)
    assert said == "help launcher slurm: slurm is an option. Did you mean help launcher=slurm?"
    assert answer(["launcher", "trainer.seed"], True)


def test_a_current_folder_that_is_removed_is_one_sentence_and_2(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); os.execv({sys.executable!r}, "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}[{sys.executable!r}, '-m', 'ddpexp', 'recipe=mnist'])"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ddpexp: the current folder has been removed: change to another one.\n"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, "resume run: Its config.yaml is missing."),
        ("trainer: {", "resume run: {path} cannot be read: while parsing a flow node"),
        ("- a\n", "resume run: {path} is not the configuration of a run."),
    ],
)
def test_for_a_lost_config_the_command_that_copies_it_from_a_checkpoint_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, sentence: str
) -> None:
    run = shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    config, newest = run / "config.yaml", max((run / "checkpoints").glob("step-*"))
    shutil.move(config, newest / "config.yaml")
    if written is not None:
        config.write_text(written)
    said = refused(resume, call("resume", "run"))
    assert said.startswith(sentence.format(path=Path("run/config.yaml")))
    command = said.partition(" Its newest checkpoint holds a copy: ")[2]
    subprocess.run(command.split(), check=True, timeout=PATIENCE)
    assert "names code of its own" in refused(resume, call("resume", "run"))


def test_a_damaged_config_without_a_copy_is_reported_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for copy in run.glob("checkpoints/*/config.yaml"):
        copy.unlink()
    (run / "config.yaml").write_text("- a\n")
    assert refused(resume, call("resume", "run")) == (
        "resume run: run/config.yaml is not the configuration of a run. No checkpoint holds a copy: put one back, or "
        "start a new run with another run.dir."
    )
    (run / "config.yaml").unlink()
    assert refused(resume, call("resume", "run")) == (
        "resume run: Its config.yaml is missing. No checkpoint holds a copy: put one back, or start a new run with another "
        "run.dir."
    )


def test_of_weights_at_a_url_the_download_is_left_to_the_user() -> None:
    url = "https://example.com/model.safetensors"
    assert refused(check_usable, Path(url), f"run.init_from={url}") == (
        f"run.init_from={url}: There is no such file. Download it first: ddpexp reads only local files."
    )
