"""Launchers of other packages: an entry point and a YAML file, installed as pip does it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Ddpexp, Done, python_path
from tests.examples import install
from tests.points import Recipe

CODE = """\
class Tells(Sides):
    def __init__(self):
        print("niceness", os.nice(0), flush=True)
"""
OURS = "elastic, inline, mpi, slurm, spawn, torchrun-env"


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


def test_its_keys_are_checked_like_ours(recipe: Recipe, example: Path) -> None:
    for word, sentence in (
        ("launcher.niceness=low", "launcher.niceness=low is not a whole number."),
        ("launcher.nicenes=3", "launcher.nicenes is not a known key. Did you mean launcher.niceness?"),
    ):
        done = recipe("launcher=polite", word, environ=seeing(example))
        assert (done.code, done.err) == (2, f"ddpexp: {sentence}\n")


def test_an_unknown_name_and_the_help_list_it(recipe: Recipe, example: Path) -> None:
    for word, sentence in (
        ("polit", "launcher=polit is not a known option. Did you mean launcher=polite?"),
        (
            "zzz",
            "launcher=zzz is not a known option. Available: elastic, inline, mpi, polite, slurm, spawn, torchrun-env.",
        ),
    ):
        done = recipe(f"launcher={word}", environ=seeing(example))
        assert (done.code, done.err) == (2, f"ddpexp: {sentence}\n")
    shown = recipe.ddpexp("--help", environ=seeing(example))
    assert "\n  launcher   elastic, inline, mpi, polite, slurm, spawn*, torchrun-env\n" in shown.out
    without = recipe("launcher=polite")
    assert (without.code, without.err) == (2, f"ddpexp: launcher=polite is not a known option. Available: {OURS}.\n")


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


def test_it_states_its_own_rules_and_keeps_those_of_every_launcher(recipe: Recipe, tmp_path: Path) -> None:
    imports = "from typing import ClassVar\nfrom ddpexp.errors import RefusedError\n"
    environ = package(tmp_path, "toy:Toy", f"{imports}{LAUNCHER}{OWN_RULE}")
    for overrides, sentence in (
        ((), "launcher=toy binds cores itself. Use trainer.numa_binding=false."),
        (("trainer.nodes=1:2",), "trainer.nodes=1:2 is a range, which only launcher=elastic supports. Use "),
        (("trainer.backend=mpi",), "trainer.backend=mpi needs launcher=mpi, because only mpirun connects the ranks"),
    ):
        done = recipe("launcher=toy", *overrides, environ=environ)
        assert (done.code, done.err[: len(sentence) + 8]) == (2, f"ddpexp: {sentence}")


@pytest.mark.parametrize(
    ("value", "code", "sentence"),
    [
        ("toy:Tiy", LAUNCHER, r"launcher\._target_=toy\.Tiy: The module toy has no Tiy\. Did you mean Toy\?"),
        ("toy.inner:Toy", LAUNCHER, r"launcher\._target_=toy\.inner\.Toy: toy has no inner\..*"),
        ("toy:Toy", "class Toy:\n    pass\n", r"launcher\._target_=toy\.Toy is not a launcher: it must .* from ddpexp\.launch\.launchers\.base\.Launcher\."),
        ("toy:Toy", "class Toy:\n    def launch(self, job, server=None): ...\n",
         r"launcher\._target_=toy\.Toy is not a launcher: it must .* from ddpexp\.launch\.launchers\.base\.Launcher\."),
        ("toy:Toy", "def Toy():\n    pass\n", r"launcher\._target_=toy\.Toy is not a launcher: it must .* from ddpexp\.launch\.launchers\.base\.Launcher\."),
        ("toy:Toy", "Toy = 3\n", r"launcher\._target_=toy\.Toy is not a class or function of an allowed module\."),
        ("toy:os.system", "import os\n", (
            r"launcher\._target_=toy\.os\.system reaches the module os through another "
            r"one\."
        )),
        ("toy", LAUNCHER, r"launcher\._target_=toy is not allowed: .*"),
        ("toy:Toy", "import nowhere_at_all\n",
         r"launcher\._target_=toy\.Toy cannot be imported: ModuleNotFoundError: No module named "
         r"'nowhere_at_all'\. Is its package complete\?"),
        ("toy:Toy", "1 +\n", r"launcher\._target_=toy\.Toy cannot be imported: SyntaxError: .*"),
    ],
)  # fmt: skip
def test_what_is_no_launcher_is_refused_in_a_sentence(
    recipe: Recipe, tmp_path: Path, value: str, code: str, sentence: str
) -> None:
    done = recipe("launcher=toy", environ=package(tmp_path, value, code))
    assert done.code == 2
    assert re.fullmatch(rf"ddpexp: {sentence}\n", done.err), done.err
    assert not done.run.exists()


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
    assert done.code == 2
    assert done.err.startswith("ddpexp: launcher._target_=toy.Other is not allowed: ")
    assert done.err.endswith(
        " A package offers a launcher by an entry point in the group ddpexp.launchers that names just this class.\n"
    )
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
        assert (
            f"ddpexp: warning: {conf}/{name}.yaml is not used: ddpexp has its own {name}. Give yours another name.\n"
            in done.err
        )
    text = (done.run / "config.yaml").read_text()
    assert "_target_: spawn" in text
    assert "seed: 0" in text
    assert not (tmp_path / "imported").exists()
