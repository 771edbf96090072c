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
from ddpexp.sweep.arguments import TableArguments
from tests.conftest import PATIENCE, ROOT, python_path
from tests.refusals import refused
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


@pytest.mark.parametrize("folder", ["outputs", "outputs/mnist"])
@pytest.mark.parametrize(("name", "work"), [("resume", resume), ("evaluate", evaluate)])
def test_for_a_folder_of_runs_the_error_names_the_newest(
    outputs: Path, name: str, work: Callable[..., Any], folder: str
) -> None:
    with refused(f"{name} {folder}: outputs/mnist/4, outputs/mnist/3, outputs/mnist/2 and 2 more."):
        work(call(name, folder))


SOURCES = [
    ("evaluate run.dir=good", "evaluate good?"),
    ("resume run.dir=good", "resume good?"),
    ("evaluate outputs/mnist/1/config.yaml", "outputs/mnist/1?"),
    ("evaluate outputs/mnist/1 outputs/mnist/2", "one directory"),
    ("resume outputs/mnist/1 outputs/mnist/2", "one directory"),
]


@pytest.mark.parametrize(("typed", "word"), SOURCES)
def test_for_a_run_named_another_way_the_error_gives_its_name(outputs: Path, typed: str, word: str) -> None:
    name, *overrides = typed.split()
    with refused(f"{typed}: {word}"):
        {"evaluate": evaluate, "resume": resume}[name](call(name, *overrides))


@pytest.mark.parametrize(
    ("option", "meant"), [("--splt", "--split"), ("--splits=eval", "--split"), ("--jsn", "--json")]
)
def test_a_misspelt_option_of_evaluate_is_refused_with_the_right_one(option: str, meant: str) -> None:
    with refused(f"evaluate {option}: {meant}?"):
        call("evaluate", "outputs/mnist/1", option, "eval")


@pytest.mark.parametrize("option", ["--ckpt_path", "--ckpt", "--checkpoint_path"])
def test_a_checkpoint_is_named_by_a_word(option: str) -> None:
    assert call("evaluate", "outputs/mnist/1", "--checkpoint", "best").checkpoint == "best"
    assert call("evaluate", "outputs/mnist/1").checkpoint == "auto"
    with refused(f"evaluate {option}: --checkpoint best"):
        call("evaluate", "outputs/mnist/1", option, "best")


PLANS = [
    (["recipe=mnist", "--nodes", "2"], "plan --nodes: trainer.nodes=2?"),
    (["--gpus=4"], "plan --gpus=4: trainer.gpus=4?"),
    (["--batch-size", "2"], "plan --batch-size: trainer.global_batch_size"),
    (["--jason"], "plan --jason: --json?"),
    (["outputs/mnist/1"], "plan outputs/mnist/1: overrides.yaml"),
]


@pytest.mark.parametrize(("overrides", "expected"), PLANS)
def test_what_a_plan_does_not_accept_is_refused(outputs: Path, overrides: Sequence[str], expected: str) -> None:
    with refused(expected):
        call("plan", *overrides)


def test_what_a_table_does_not_accept_is_refused(outputs: Path) -> None:
    with refused("outputs/mnist/1/metrics.jsonl: outputs/mnist/1."):
        TableArguments.of(["outputs/mnist/1/metrics.jsonl"])
    with refused("table --sort: sweep.objective=METRIC"):
        call("table", "outputs", "--sort", "x")


def test_for_an_option_behind_its_group_the_error_gives_both_in_one_argument() -> None:
    with refused("help launcher slurm: launcher=slurm"):
        answer(["launcher", "slurm"], by_name=True)
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
    ("written", "expected"),
    [(None, ": missing"), ("trainer: {", ": flow node"), ("- a\n", ": configuration of a run")],
)
def test_for_a_lost_config_the_command_that_copies_it_from_a_checkpoint_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, expected: str
) -> None:
    run = shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    config, newest = run / "config.yaml", max((run / "checkpoints").glob("step-*"))
    shutil.move(config, newest / "config.yaml")
    if written is not None:
        config.write_text(written)
    with refused(expected) as caught:
        resume(call("resume", "run"))
    command = str(caught.value).partition(" Its newest checkpoint holds a copy: ")[2]
    subprocess.run(command.split(), check=True, timeout=PATIENCE)
    with refused(": code of its own"):
        resume(call("resume", "run"))


def test_a_damaged_config_without_a_copy_is_reported_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for copy in run.glob("checkpoints/*/config.yaml"):
        copy.unlink()
    (run / "config.yaml").write_text("- a\n")
    with refused(": No checkpoint"):
        resume(call("resume", "run"))
    (run / "config.yaml").unlink()
    with refused(": No checkpoint"):
        resume(call("resume", "run"))


def test_of_weights_at_a_url_the_download_is_left_to_the_user() -> None:
    url = "https://example.com/model.safetensors"
    with refused(f"run.init_from={url}: Download"):
        check_usable(Path(url), f"run.init_from={url}")
