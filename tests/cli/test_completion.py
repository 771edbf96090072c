"""What can stand at the cursor; the shells themselves are in test_shells.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpexp.cli import verbs
from ddpexp.cli.completion import LINE, SHELLS, Line, candidates, completion, parse
from tests.conftest import PATIENCE, ROOT, Ddpexp, python_path
from tests.listed import options
from tests.refusals import command_refused, refused
from tests.typed import call


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs, weights and configs."""
    kept = ROOT / "tests/samples"
    (tmp_path / "outputs/mnist").mkdir(parents=True)
    (tmp_path / "outputs/mnist/first").symlink_to(kept / "finished")
    (tmp_path / "my runs").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "evil\n\x1b[31m").mkdir()
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "conf").symlink_to(kept / "project/conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(typed: str) -> list[str]:
    *words, current = typed.split(" ")
    return sorted(word.text + " " * word.is_whole for word in candidates(words, current))


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("resu", ["resume "]),
        ("trainer.redu", ["trainer.reduction="]),
        ("trainer.reduction=", ["fast ", "exact "]),
        ("trainer.reduction=e", ["exact "]),
        ("trainer.deterministic=", ["true ", "false "]),
        ("trainer.compile=r", ["reduce-overhead "]),
        ("trainer.clip_grad_norm=", ["null "]),
        ("trainer.seed=", ["0 "]),
        ("trainer.gpus=", ["auto "]),
        ("trainer.tim", ["trainer.timeout."]),
        ("trainer.timeout.s", ["trainer.timeout.step_seconds=", "trainer.timeout.save_seconds="]),
        ("run.allow_changes=", ["[code] ", "[data] ", "[] "]),
        ("model=", [f"{name} " for name in options("model")]),
        ("mod", ["model=", "model."]),
        ("model.", ["model._target_=", "model.width=", "model.hidden="]),
        ("model=linear model.", ["model._target_="]),
        ("model.width=", ["[16,32] "]),
        ("launcher=slurm launcher.part", ["launcher.partition="]),
        ("launcher.part", []),
        ("++trainer.redu", ["++trainer.reduction="]),
        ("~trainer.redu", ["~trainer.reduction="]),
        (
            "trainer.gpu=2 model=nothere trainer.redu",
            ["trainer.reduction="],
        ),  # what is wrong before the cursor is not checked
        ("sweep.", []),
        ("-m sweep.mo", ["sweep.mode="]),
        ("-m sweep.mode=", ["min ", "max "]),
        ("-m trainer.precision=fp32,b", ["fp32,bf16 "]),
        ("-m hydra.", ["hydra.sweep."]),
        ("--c", ["--config-dir ", "--cfg "]),
        ("--cfg ", ["job ", "hydra ", "all "]),
        ("--config-dir ", ["conf/", "my runs/", "outputs/"]),
        ("--config-dir=co", ["conf/"]),
        ("-cd co", ["conf/"]),
        ("--config-dir conf model=my", ["mynet "]),
        ("--config-dir=conf recipe=mine data.sam", ["data.samples=", "data.samples_per_epoch="]),
        ("--config-dir nowhere model=", [f"{name} " for name in options("model")]),
        ("run.dir=", ["null ", "conf/", "my runs/", "notes.txt ", "outputs/", "weights.safetensors "]),
        ("run.init_from=w", ["weights.safetensors "]),
        ("data.root=./o", ["./outputs/"]),
        ("model.file=./w", ["./weights.safetensors "]),
        ("resume ", ["conf/", "my runs/", "outputs/"]),
        ("resume .h", [".hidden/"]),
        ("resume outputs/mnist/", ["outputs/mnist/first "]),
        ("resume nowhere/", []),
        ("resume outputs/mnist/first trainer.redu", ["trainer.reduction="]),
        ("resume outputs/mnist/first lau", ["launcher=", "launcher."]),
        ("resume --config-dir conf out", ["outputs/"]),
        ("resume --", ["--config-dir ", "--help "]),
        ("evaluate w", ["weights.safetensors "]),
        ("evaluate n", []),
        ("evaluate weights.safetensors rec", ["recipe=", "recipe."]),
        ("status o", ["outputs/"]),
        ("status outputs/mnist/first ", []),
        ("table outputs/mnist/first my", ["my runs/"]),
        ("table sweep.m", ["sweep.mode="]),
        ("table sweep.mode=m", ["min ", "max "]),
        ("table --out o", ["outputs/"]),
        ("table --", ["--out ", "--columns ", "--all ", "--format ", "--seeds ", "--json ", "--help "]),
        ("status --", ["--json ", "--help "]),
        ("evaluate --j", ["--json "]),
        ("plan --num", ["--num_samples "]),
        ("plan trainer.prec", ["trainer.precision="]),
        ("completion ", ["bash ", "zsh ", "fish "]),
        ("completion bash ", []),
        ("help trainer.redu", ["trainer.reduction "]),
        ("help resu", ["resume "]),
        ("help launcher=s", ["slurm ", "spawn "]),
    ],
)
def test_each_position_gets_the_completions_that_are_valid_there(typed: str, found: list[str]) -> None:
    current = typed.rpartition(" ")[2]
    begin = current[: current.find("=") + 1]
    assert texts(typed) == sorted(f"{begin}{word}" for word in found)


def test_the_first_place_gets_the_commands_first() -> None:
    found = [word.text + " " * word.is_whole for word in candidates([], "")]
    assert found[: len(verbs.NAMES)] == [f"{name} " for name in verbs.NAMES]
    assert {"recipe=", "model=", "optimizer.", "trainer.", "run."} <= {*found}
    assert "sweep." not in found


def test_every_completion_has_a_description() -> None:
    for words in ([], ["help"]):
        about = {word.text: word.about for word in candidates(words, "")}
        assert about["status"] == verbs.BY_NAME["status"].summary
    assert {word.text: word.about for word in candidates([], "")}["trainer."] == "How a model is trained."
    about = {word.text: word.about for word in candidates([], "trainer.")}
    assert about["trainer.seed="].startswith("(0) Seed of the initialization")
    assert {word.text: word.about for word in candidates([], "model=")}["model=linear"].startswith("One linear layer")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ddpexp ", Line(("ddpexp",), "", "", "")),
        ("ddpexp re", Line(("ddpexp",), "re", "", "re")),
        ("a=1 ddpexp  run.dir=x", Line(("a=1", "ddpexp"), "run.dir=x", "", "x")),
        ("ddpexp my\\ r", Line(("ddpexp",), "my r", "", "my\\ r")),
        ("ddpexp 'my runs'/a", Line(("ddpexp",), "my runs/a", "", "'my runs'/a")),
        ('ddpexp "a\\"b', Line(("ddpexp",), 'a"b', '"', 'a\\"b')),
        ("ddpexp 'run.dir=my r", Line(("ddpexp",), "run.dir=my r", "'", "run.dir=my r")),
        ("ddpexp x '' ", Line(("ddpexp", "x", ""), "", "", "")),
        ("ddpexp a:b\\", Line(("ddpexp",), "a:b", "", "b\\")),
    ],
)
def test_a_line_is_taken_apart_as_bash_does(text: str, line: Line) -> None:
    assert parse(text, " \t\n\"'><=;|&(:") == line


def asked(ddpexp: Ddpexp, shell: str, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpexp", "completion", shell], env={**ddpexp.environ, LINE: line, "TRAP": "x"},
        cwd=ddpexp.folder,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def test_the_command_line_is_neither_run_nor_shown_and_torch_is_not_imported(ddpexp: Ddpexp, place: Path) -> None:
    trap = place / "trap"
    (trap / "torch").mkdir(parents=True)
    (trap / "torch/__init__.py").write_text(f"open({str(place / 'imported')!r}, 'w').close()\n")
    (place / "mine.py").write_text(f"open({str(place / 'imported')!r}, 'w').close()\n")
    ddpexp.environ = {**ddpexp.environ, "PYTHONPATH": python_path(trap)}
    done = asked(
        ddpexp,
        "fish",
        "ddpexp --config-dir conf recipe=mine run.trust=[mine] model.token=hf_0123456789abcdefghij trainer.see",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trainer.seed=\t(0) Seed of the initialization")
    assert not (place / "imported").exists()


def test_a_shell_waits_for_completions_for_a_limited_time(place: Path) -> None:
    pipe = place / "pipe"
    os.mkfifo(pipe)  # whoever opens it waits, as on a network's disk that does not answer
    program = (
        "from ddpexp.cli import completion as c, verbs; c._SECONDS = 0.5\n"
        f"c.candidates = lambda *_: open({str(pipe)!r}).readlines()\nc.completion(verbs.BY_NAME['completion'].parse(['bash'])); print('came back')"
    )
    environ = {**os.environ, "PYTHONPATH": python_path(), LINE: "ddpexp trainer."}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("words", ["", "tcsh", "bash zsh"])
def test_another_shell_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr("gc.disable", lambda: None)  # for this process goes on
    with refused("bash, zsh, fish"):
        completion(call("completion", *words.split()))


def test_hydras_own_completion_is_refused_with_ours(ddpexp: Ddpexp) -> None:
    done = ddpexp("--shell-completion", "install=bash")
    command_refused(done, '--shell-completion: eval "$(ddpexp completion bash)"')


def test_the_readme_says_how_each_shell_gets_it() -> None:
    text = (ROOT / "README.md").read_text()
    for shell in SHELLS:
        assert f"ddpexp completion {shell}" in text
