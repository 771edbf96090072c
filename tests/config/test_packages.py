"""Packages that bring configs by Hydra's SearchPathPlugin.

Installed, they are found, and what their configs name is trusted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, Ddpexp, python_path
from tests.listed import listed, unwrapped
from tests.refusals import command_refused
from tests.test_user_recipes import CODE

PLUGIN = """\
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Shapes(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("shapes", "pkg://shapes.conf")
"""
FILES = {
    "hydra_plugins/shapes_plugin.py": PLUGIN,
    "shapes/__init__.py": "",
    "shapes/nets.py": CODE + "\n\ndef secret(**_):\n    raise SystemExit('this ran')\n",
    "shapes/conf/__init__.py": "",
    "shapes/conf/recipe/shapes.yaml": """\
# @package _global_
defaults:
  - override /model: sides
  - override /data: shapes
  - override /logger: none
task: {_target_: shapes.nets.Sides}
trainer: {epochs: 1, global_batch_size: 16}
""",
    "shapes/conf/model/sides.yaml": "_target_: shapes.nets.Net\nhidden: 8\nactivation: {_target_: torch.nn.Tanh}\n",
    "shapes/conf/data/shapes.yaml": "_target_: shapes.nets.load\ncount: 64\n",
}


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a package offers is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on Python's path with such a package."""
    folder = tmp_path_factory.mktemp("site-packages")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def seeing(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": python_path(folder)}


def test_an_installed_packages_recipe_trains_and_is_evaluated_without_run_trust(
    ddpexp: Ddpexp, installed: Path
) -> None:
    done = ddpexp("recipe=shapes", "trainer.gpus=2", environ=seeing(installed))
    assert (done.code, done.err) == (0, "")
    assert "recipe  shapes" in done.out
    again = ddpexp("evaluate", str(done.run), environ=seeing(installed))
    assert (again.code, again.err) == (0, "")
    shown = ddpexp("--help", environ=seeing(installed))
    for group, own, chosen in (("recipe", "shapes", "mnist"), ("model", "sides", "lenet"), ("data", "shapes", "mnist")):
        assert f" {listed(group, own, chosen=chosen)} " in unwrapped(shown.out)
    without = ddpexp("evaluate", str(done.run))
    command_refused(without, f"{done.run.name}: data._target_=shapes.nets.load")


COMPOSED = """\
import sys
from ddpexp.config.parse import parse
from ddpexp.config.compose import compose
from ddpexp.errors import RefusedError
for word in sys.argv[1:]:
    try:
        print(parse(compose(["recipe=shapes", *word.split()]).values).run.trust)
    except RefusedError as error:
        print(error)
"""


def test_only_what_its_own_configs_name_is_trusted_by_just_that_name(installed: Path, environ: dict[str, str]) -> None:
    overrides = [
        "trainer.seed=1",
        "model._target_=shapes.nets.secret",
        "task._target_=shapes.nets.Sidess",
        "run.trust=[shapes.nets]",
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMPOSED, *overrides], env={**environ, **seeing(installed)}, capture_output=True,
        text=True, timeout=PATIENCE,
    )  # fmt: skip
    plain, secret, typo, typed = done.stdout.splitlines()
    assert plain == "('shapes.nets.Net', 'shapes.nets.Sides', 'shapes.nets.load')"
    assert secret.startswith("model._target_=shapes.nets.secret is not allowed")
    assert typo.startswith("task._target_=shapes.nets.Sidess is not allowed")
    assert typed == "('shapes.nets',)"
