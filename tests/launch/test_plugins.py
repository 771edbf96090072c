"""Launchers of other packages: an entry point and a YAML file, installed as pip does it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import ddpexp
from tests.conftest import Ddpexp, Done, python_path
from tests.examples import install
from tests.points import Recipe
from tests.refusals import refused

CODE = """\
class Tells(Sides):
    def __init__(self):
        print("niceness", os.nice(0), flush=True)
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a package's launcher does is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("plugins"), environ), CODE)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of docs/launchers.md, installed into a folder of its own."""
    return install("launcher", tmp_path_factory.mktemp("launcher"))


def seeing(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": python_path(*folders)}


def niceness(done: Done) -> list[str]:
    return [
        re.findall(r"^niceness (\d+)$", log.read_text(), re.MULTILINE)[0]
        for log in sorted((done.run / "ranks").iterdir())
    ]


def test_an_installed_launcher_runs_an_experiment(recipe: Recipe, example: Path) -> None:
    overrides = ("trainer.gpus=2", "trainer.threads=1", "task._target_=points.Tells")
    ours = recipe(*overrides)
    done = recipe(*overrides, "launcher=polite", environ=seeing(example))
    assert (done.code, done.err) == (0, "")
    assert done.result()["weights_sha256"] == ours.result()["weights_sha256"]
    assert (niceness(ours), niceness(done)) == (["0", "0"], ["10", "10"])
    again = recipe(*overrides, "launcher=polite", "launcher.niceness=3", environ=seeing(example))
    assert (again.code, niceness(again)) == (0, ["3", "3"])


@pytest.mark.slow
def test_its_run_is_evaluated_with_and_without_it(recipe: Recipe, example: Path) -> None:
    done = recipe("launcher=polite", environ=seeing(example))
    overrides = ("evaluate", str(done.run), "--config-dir", str(recipe.folder / "conf"))
    without = recipe.ddpexp(*overrides)
    again = recipe.ddpexp(*overrides, "launcher=polite", environ=seeing(example))
    assert (without.code, again.code, again.out) == (0, 0, without.out), again.err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("launcher=polite launcher.niceness=low", "launcher.niceness=low: whole number"),
        ("launcher=polite launcher.nicenes=3", "launcher.nicenes: launcher.niceness?"),
        ("launcher=polit", "launcher=polit: launcher=polite?"),
        ("launcher=zzz", "launcher=zzz: mpi, polite, slurm"),
    ],
)
def test_its_name_and_its_keys_are_checked_like_ours(
    see_packages: Callable[[Path], None], example: Path, override: str, expected: str
) -> None:
    see_packages(example)
    with refused(expected):
        ddpexp.compose(override.split())


def test_the_help_lists_it_and_it_is_unknown_without_its_package(recipe: Recipe, example: Path) -> None:
    shown = recipe.ddpexp("--help", environ=seeing(example))
    assert "\n  launcher   elastic, inline, mpi, polite, slurm, spawn*, torchrun-env\n" in shown.out
    with refused("launcher=polite: elastic, inline, mpi, slurm, spawn, torchrun-env"):
        ddpexp.compose(["launcher=polite"])


# ----------------------------------------------------------------------------------------------- packages that are not
# right


def package(folder: Path, value: str, code: str = "", option: str = "toy", target: str | None = None) -> dict[str, str]:
    """Put a package where Python finds it, as pip leaves it: an entry point, a module, a YAML file."""
    info = folder / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ddpexp.launchers]\n{option} = {value}\n")
    (folder / f"toy/conf/launcher/{option}.yaml").parent.mkdir(parents=True)
    (folder / f"toy/conf/launcher/{option}.yaml").write_text(f"_target_: {target or value.replace(':', '.')}\n")
    (folder / "toy/__init__.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()\n{code}")
    return seeing(folder)


LAUNCHER = """\
from dataclasses import dataclass

from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.launchers.local import Spawn


@dataclass(frozen=True)
class Toy(Launcher):
    def launch(self, job, server=None):
        return Spawn().launch(job, server)
"""


OWN_RULE = """
    takes_slots: ClassVar[bool] = True

    def check(self, experiment):
        super().check(experiment)
        if experiment.trainer.numa_binding:
            raise RefusedError("binds cores itself", key="launcher", value="toy", suggestion="Use trainer.numa_binding=false.")
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "launcher=toy: cores"),
        (["trainer.nodes=1:2"], "trainer.nodes=1:2: launcher=elastic"),
        (["trainer.backend=mpi"], "trainer.backend=mpi: launcher=mpi"),
    ],
)
def test_it_states_its_own_rules_and_keeps_those_of_every_launcher(
    see_packages: Callable[[Path], None], tmp_path: Path, overrides: list[str], expected: str
) -> None:
    imports = "from typing import ClassVar\nfrom ddpexp.errors import RefusedError\n"
    package(tmp_path, "toy:Toy", f"{imports}{LAUNCHER}{OWN_RULE}")
    see_packages(tmp_path)
    with refused(expected):
        ddpexp.compose(["launcher=toy", *overrides])


@pytest.mark.parametrize(
    ("value", "code", "expected"),
    [
        ("toy:Tiy", LAUNCHER, "toy.Tiy: Toy?"),
        ("toy.inner:Toy", LAUNCHER, "toy.inner.Toy: inner"),
        ("toy:Toy", "class Toy:\n    pass\n", "toy.Toy: ddpexp.launch.launchers.base.Launcher"),
        ("toy:Toy", "class Toy:\n    def launch(self, job, server=None): ...\n", "toy.Toy: dataclass"),
        ("toy:Toy", "def Toy():\n    pass\n", "toy.Toy: dataclass"),
        ("toy:Toy", "Toy = 3\n", "toy.Toy: class or function"),
        ("toy:os.system", "import os\n", "toy.os.system: module os"),
        ("toy", LAUNCHER, "toy: entry point"),
        ("toy:Toy", "import nowhere_at_all\n", "toy.Toy: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("toy:Toy", "1 +\n", "toy.Toy: SyntaxError"),
    ],
)
def test_what_is_no_launcher_is_refused_in_a_sentence(
    see_packages: Callable[[Path], None], tmp_path: Path, value: str, code: str, expected: str
) -> None:
    package(tmp_path, value, code)
    see_packages(tmp_path)
    with refused(f"launcher._target_={expected}"):
        ddpexp.compose(["launcher=toy"])


@pytest.mark.variants(1)
@pytest.mark.parametrize("value", [":Toy", "a b:Toy", "..:", "toy:"])
def test_an_entry_point_without_sense_disturbs_nobody(recipe: Recipe, tmp_path: Path, value: str) -> None:
    environ = package(tmp_path, value, target="toy.Toy")
    assert recipe(environ=environ).code == 0
    done = recipe("launcher=toy", environ=environ)
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_a_class_that_the_entry_point_does_not_name_is_not_allowed(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe("launcher=toy", environ=package(tmp_path, "toy:Toy", LAUNCHER, target="toy.Other"))
    assert (done.code, done.run.exists()) == (2, False)
    assert re.match(r"ddpexp: launcher\._target_=toy\.Other .* ddpexp\.launchers ", done.err), done.err
    assert not (tmp_path / "imported").exists()


@pytest.mark.variants(1)
@pytest.mark.parametrize("value", ["toy:Toy", "toy:Toy [extra]"])
def test_a_class_may_be_offered_by_a_shorter_name_than_its_own(recipe: Recipe, tmp_path: Path, value: str) -> None:
    environ = package(tmp_path, value, "from toy.deep import Toy\n", target="toy.Toy")
    (tmp_path / "toy/deep.py").write_text(LAUNCHER)
    done = recipe("launcher=toy", environ=environ)
    assert (done.code, done.err) == (0, "")


def test_a_launcher_that_is_not_chosen_is_not_imported(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe(environ=package(tmp_path, "toy:Toy", LAUNCHER))
    assert done.code == 0, done.err
    assert not (tmp_path / "imported").exists()


def test_a_package_cannot_shadow_what_is_ours(recipe: Recipe, tmp_path: Path) -> None:
    environ = package(tmp_path, "toy:Toy", LAUNCHER, option="spawn")
    conf = tmp_path / "toy/conf"
    (conf / "config.yaml").write_text("defaults: []\n")
    (conf / "trainer").mkdir()
    (conf / "trainer/default.yaml").write_text("seed: 7\n")
    done = recipe("launcher=spawn", environ=environ)
    assert done.code == 0
    for name in ("launcher/spawn", "trainer/default"):
        assert f"ddpexp: warning: {conf}/{name}.yaml " in done.err
    text = (done.run / "config.yaml").read_text()
    assert "_target_: spawn" in text
    assert "seed: 0" in text
    assert not (tmp_path / "imported").exists()
