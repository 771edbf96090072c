"""`--help`, `ddpexp help` and the answers to what is no command."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpexp.cli import main, verbs
from ddpexp.cli.help import answer, explain, first
from ddpexp.cli.keys import Catalogue, typed
from ddpexp.config.compose import overview
from ddpexp.config.folders import conf_folder
from ddpexp.errors import RefusedError
from ddpexp.train.step_times import RECORDED_PHASES, SLOW_FACTOR, SLOW_RANK
from tests.conftest import PATIENCE, Ddpexp
from tests.listed import listed, unwrapped
from tests.refusals import refused

NAMES = sorted(path.relative_to(conf_folder()).with_suffix("") for path in conf_folder().glob("*/*.yaml"))


def leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's folder of configs."""
    write(tmp_path / "conf/recipe/mine.yaml", """\
# @package _global_
# Learns a parity.
defaults:
  - override /model: deep
task:
  _target_: mine.Task
  weight: 1.5  # Of the second loss.
trainer:
  # Long enough to converge.
  max_steps: 7
""")  # fmt: skip
    write(tmp_path / "conf/model/base.yaml", "# Units of a layer.\nhidden: 8\n")
    write(
        tmp_path / "conf/model/deep.yaml",
        "# Many layers.\ndefaults: [base]\n_target_: mine.Net\n# How many.\ndepth: 3\n",
    )
    write(
        tmp_path / "conf/augment/noise.yaml",
        "# @package data\n# Noise on every sample.\n_target_: mine.load\nsigma: 1e-3 # Of it.\n",
    )
    return tmp_path / "conf"


# --------------------------------------------------------------------------------------------------------------- every
# key


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue(overview([], None))


@pytest.mark.parametrize("option", NAMES, ids=str)
def test_every_key_of_every_option_is_explained_by_a_comment(catalogue: Catalogue, option: Path) -> None:
    group, name = option.parts
    found = catalogue.option(group, name)
    assert found.about
    assert not [key.name for key in found.keys if not key.meaning and not key.name.endswith("._target_")]


def test_the_keys_of_the_command_are_explained_too(catalogue: Catalogue) -> None:
    for section in catalogue.sections:
        assert catalogue.about(section)
        assert not [
            key.name for key in catalogue.keys(section) if not key.meaning and not key.name.endswith("._target_")
        ]


def test_help_lists_every_key_with_its_value_what_it_may_be_and_what_it_means() -> None:
    text = answer(["trainer.seed=41", "launcher=slurm", "model.width=[4,8]"], by_name=False)
    for key, value in leaves(overview(["trainer.seed=41", "launcher=slurm", "model.width=[4,8]"], None).values).items():
        assert value == {} or f"\n  {key}={typed(value)}" in text  # a section without keys, as without callbacks
    for lines in (
        "  trainer.seed=41                           a whole number from 0 to 2**63 - 1\n      Seed of the initialization",
        "  trainer.precision=fp32                    one of fp32, bf16, fp16\n      fp32, bf16 (autocast)",
        "  trainer.deterministic=false               true or false\n",
        "  launcher.partition=null                   a text or null\n",
        "  model.width=[4,8]                         a list\n      Channels of the two convolutions.\n",
        "  trainer.timeout                           a section\n      A run ends after this many seconds without",
        "  hydra.sweep.dir=outputs/sweeps/${now:%Y-%m-%d_%H-%M-%S}\n",
        "\nlauncher=slurm: Slurm. On the login node:",
    ):
        assert lines in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_given_first_stands_first() -> None:
    text = answer([], by_name=False)
    places = [text.index(word) for word in ("usage:", "recipe=mnist", "The commands", "  resume ", (
        "--config-dir DIR  "
        "your own"
    ),
                                            "  recipe  ", "  optimizer  ", "\n  trainer.gpus=",
                                            "\nsweep:")]  # fmt: skip
    assert places == sorted(places)


def test_a_users_groups_and_their_comments_are_shown_beside_ours(mine: Path) -> None:
    text = answer([f"--config-dir={mine}", "recipe=mine"], by_name=False)
    for line in (listed("recipe", "mine", chosen="mine"), listed("model", "base", "deep", chosen="deep")):
        assert f" {line} " in unwrapped(text)
    for lines in (
        "  augment    noise\n",
        "\nrecipe=mine: Learns a parity.\n", "\nmodel=deep: Many layers.\n",
        "  model.depth=3                             a whole number\n      How many.\n",
        "  model.hidden=8                            a whole number\n      Units of a layer.\n",
        "  task.weight=1.5                           a number\n      Of the second loss.\n",
        "only epochs ends the run.\n      Whichever comes first.\n      recipe=mine: Long enough to converge.\n",
    ):  # fmt: skip
        assert lines in text
    text = answer([f"--config-dir={mine}", "augment"], by_name=True)
    assert "+augment=noise: Noise on every sample.\n" in text
    assert "  data.sigma=1e-3                           a number\n      Of it." in text


@pytest.mark.parametrize(
    ("arguments", "shown", "hidden"),
    [
        (
            "trainer.reduction",
            "  trainer.reduction=fast                    one of fast, exact\n      How gradients are",
            "trainer.seed",
        ),
        ("reduction", "  trainer.reduction=fast ", "trainer.seed"),
        ("trainer.reduction=exact", "  trainer.reduction=fast ", "trainer.seed"),
        ("trainer.timeout", "  trainer.timeout.step_seconds=600 ", "trainer.seed"),
        ("trainer", "trainer: How a model is trained.\n  trainer.nodes=auto ", "model.width"),
        (
            "launcher",
            "launcher: a group; launcher=OPTION chooses one of elastic, inline, mpi, slurm,\nspawn*, torchrun-env.\n\n",
            "trainer.seed",
        ),
        ("launcher", "\nlauncher=slurm: Slurm. ", "trainer.seed"),
        ("launcher", "    torchrun --nproc-per-node 2 -m ddpexp recipe=mnist launcher=torchrun-env\n", "trainer.seed"),
        ("launcher=slurm", "  launcher.partition=null                   a text or null\n      The partition.", "spawn"),
        ("launcher.partition", "with launcher=slurm:\n  launcher.partition=null ", "account"),
        ("data", "Whichever is chosen:\n  data.validation_fraction=0.0 ", "trainer.nodes"),
        (
            "recipe=mnist",
            "It chooses model=lenet, data=mnist, optimizer=mnist_sgd, scheduler=onecycle.\n",
            "trainer.seed",
        ),
        ("task", "task: The loss and the metrics", "trainer"),
        ("sweep", "  hydra.sweep.dir=", "trainer.seed"),
        ("trainer.seed optimizer.lr", "  optimizer.lr=0.1 ", "momentum"),
        ("optimizer=adamw optimizer.lr", "  optimizer.lr=0.001 ", "mnist_sgd"),
    ],
)
def test_help_explains_one_part(arguments: str, shown: str, hidden: str) -> None:
    text = answer(arguments.split(), by_name=True)
    assert shown in text
    assert hidden not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("nonsense", "help nonsense: ddpexp --help"),
        ("traner", "help traner: ddpexp help trainer?"),
        ("trainer.sed", "help trainer.sed: ddpexp help trainer.seed?"),
        ("callbacks.early_stopping.patince", "patince: ddpexp help callbacks.early_stopping.patience?"),
        ("evalute", "help evalute: ddpexp help evaluate?"),
        ("launcher=slrm", "launcher=slrm"),
        ("--config-dir=/not/there x", "--config-dir /not/there"),
    ],
)
def test_what_help_does_not_know_is_refused_with_the_nearest(arguments: str, expected: str) -> None:
    with refused(expected):
        answer(arguments.split(), by_name=True)


def test_options_that_an_installed_package_adds_to_hydras_search_path_are_listed(
    ddpexp: Ddpexp, tmp_path: Path
) -> None:
    write(tmp_path / "site/hydra_plugins/toy.py", """\
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Toy(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append("toy", "pkg://toy.configs")
""")  # fmt: skip
    write(tmp_path / "site/toy/__init__.py", "")
    write(tmp_path / "site/toy/configs/__init__.py", "")
    write(tmp_path / "site/toy/configs/model/toynet.yaml", "# A toy.\n_target_: toy.Net\n# Its units.\nunits: 3\n")
    done = ddpexp("--help", "model=toynet", environ={"PYTHONPATH": f"{ddpexp.environ['PYTHONPATH']}:{tmp_path}/site"})
    assert (done.code, done.err) == (0, "")
    assert f" {listed('model', 'toynet', chosen='toynet')} " in unwrapped(done.out)
    assert "\nmodel=toynet: A toy.\n" in done.out
    assert "\n  model.units=3                             a whole number\n      Its units.\n" in done.out


# ----------------------------------------------------------------------------------------------------------------
# commands


@pytest.mark.parametrize("name", verbs.NAMES)
def test_help_of_a_command_is_what_it_says_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for verb, arguments in ((name, ["--help"]), (name, ["-h"]), ("help", [name])):
        assert main._call(verbs.BY_NAME[verb], arguments, None) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0].startswith(f"{verbs.BY_NAME[name].usage}\n\n")
    assert max(map(len, outputs[0].splitlines())) <= 80


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("resum", "ddpexp resume?"),
        ("Evaluate", "ddpexp evaluate?"),
        ("eval", "ddpexp evaluate?"),
        ("continue", "ddpexp resume?"),
        ("ls", "ddpexp list?"),
        ("train", "python -m ddpexp recipe=mnist trainer.gpus=2."),
        ("./a b", "ddpexp status './a b', ddpexp resume './a b' or ddpexp rerun './a b'."),
        ("run", "ddpexp status run, ddpexp resume run or ddpexp rerun run."),
    ],
)
def test_for_an_unknown_command_the_nearest_is_suggested(
    word: str, suggestion: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedError) as caught:
        verbs.check_is_no_verb(word)
    assert (caught.value.place, caught.value.suggestion.endswith(suggestion)) == (word, True)


@pytest.mark.parametrize("word", ["trainer.gpus", "recipe=mnist", "--help", "+x=1", "a/b/c"])
def test_an_override_and_a_path_are_no_unknown_commands(word: str) -> None:
    verbs.check_is_no_verb(word)


def test_a_command_behind_an_override_is_refused() -> None:
    with refused("resume: python -m ddpexp resume"):
        verbs.check_stands_first(["trainer.seed=1", "resume"])
    for words in ("--config-dir data recipe=mnist", "recipe=mnist trainer.seed=1"):
        verbs.check_stands_first(words.split())


def test_an_unknown_command_lists_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("deploy: python -m ddpexp recipe=mnist") as caught:
        verbs.check_is_no_verb("deploy")
    lines = caught.value.suggestion.splitlines()[1:]
    assert lines == verbs.listed()
    assert [line.split()[0] for line in lines] == list(verbs.NAMES)


def test_a_command_without_arguments_says_what_to_type_first(ddpexp: Ddpexp) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddpexp"],
        cwd=ddpexp.folder,
        env=ddpexp.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{first()}\n"
    assert "ddpexp --help shows every group and key" in done.stderr
    assert list(ddpexp.folder.iterdir()) == []


def test_a_reader_that_goes_away_is_no_trouble(ddpexp: Ddpexp) -> None:
    for arguments in (["--help"], ["help", "launcher"]):
        reader, writer = os.pipe()
        assert fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096) == 4096  # less than is printed
        with subprocess.Popen(
            [sys.executable, "-m", "ddpexp", *arguments],
            env=ddpexp.environ,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ddpexp.folder,
        ) as process:
            os.close(writer)
            assert os.read(reader, 1)
            os.close(reader)
            assert process.stderr is not None
            assert (process.wait(PATIENCE), process.stderr.read()) == (0, ""), arguments


def test_the_times_of_a_record_are_a_topic_that_names_each_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(["times"], by_name=True) == 0
    shown = capsys.readouterr().out
    for name in (*(f"times/{phase}" for phase in RECORDED_PHASES), SLOW_RANK, SLOW_FACTOR):
        assert f"{name} " in shown or f"{name}," in shown or f"{name}\n" in shown
    with refused("help tims: ddpexp help times"):
        explain(["tims"], by_name=True)
