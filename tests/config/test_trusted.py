"""What the user trusts once: installed packages, at the place where they were."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddpexp.cli.trust import trust
from ddpexp.config import trusted
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.errors import RefusedError
from tests.refusals import refused
from tests.typed import call

CLASS = "helpful.optim.Careful"


def install(site: Path, root: str = "helpful", version: str = "1.0") -> None:
    """Install a package of one module into a folder of packages."""
    (site / root).mkdir(parents=True)
    (site / root / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / root / "optim.py").write_text("class Careful: ...\n\n\nclass Careless: ...\n")
    facts = site / f"{root}_kit-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {root}-kit\nVersion: {version}\n")
    (facts / "top_level.txt").write_text(f"{root}\n")
    (facts / "RECORD").write_text(f"{root}/__init__.py,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install `helpful` of `helpful-kit`, for a user without a list."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    folder = tmp_path / "site"
    install(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def composed(*overrides: str) -> list[str]:
    made = compose(["recipe=mnist", f"optimizer._target_={CLASS}", "optimizer.lr=0.1", *overrides])
    assert parse(made.values).optimizer.target == CLASS
    found: list[str] = made.values["run"]["trust"]
    return found


def test_a_class_that_is_trusted_once_needs_no_override(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suggestion in ("run.trust=[helpful]", f"ddpexp trust {CLASS}"):
        with refused(f"optimizer._target_={CLASS}: {suggestion}"):
            composed()
    assert trust(call("trust", CLASS)) == 0
    assert capsys.readouterr().out == f"{CLASS} of helpful-kit 1.0 ({site / 'helpful'}) is trusted.\n"
    assert composed() == [CLASS]
    with refused("optimizer._target_=helpful.optim.Careless: not allowed"):
        composed("optimizer._target_=helpful.optim.Careless")
    assert trust(call("trust")) == 0
    assert capsys.readouterr().out == f"{CLASS}  helpful-kit 1.0  {site / 'helpful'}\n"
    assert trust(call("trust", "--remove", CLASS)) == 0
    assert capsys.readouterr().out.startswith(f"{CLASS}: no longer trusted (")
    assert trust(call("trust")) == 0
    assert capsys.readouterr().out.startswith("Nothing is trusted beside")
    with pytest.raises(RefusedError):
        composed()


def test_a_package_may_be_trusted_as_a_whole_and_named_twice(site: Path) -> None:
    trust(call("trust", "helpful"))
    trust(call("trust", "helpful", CLASS))
    assert [entry.name for entry in trusted.read()] == ["helpful", CLASS]
    assert composed() == [CLASS]
    assert trusted.covered(["helpful.a", "helpfully.a", "helpful"]) == {"helpful.a", "helpful"}


@pytest.mark.fault("S19")
def test_a_module_of_that_name_in_another_place_is_not_trusted(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust(call("trust", CLASS))
    stranger = tmp_path / "stranger"
    (stranger / "helpful").mkdir(parents=True)
    (stranger / "helpful/__init__.py").write_text("raise SystemExit('imported')\n")
    (stranger / "helpful/optim.py").write_text("class Careful: ...\n")
    monkeypatch.chdir(stranger)
    monkeypatch.syspath_prepend(str(stranger))
    with refused(f"optimizer._target_={CLASS}: at {site / 'helpful'}, and here it is {stranger / 'helpful'}"):
        composed()
    with refused("trust helpful: helpful-kit"):
        trust(call("trust", "helpful"))


def test_a_new_version_at_the_same_place_stays_trusted(site: Path) -> None:
    trust(call("trust", CLASS))
    os.rename(site / "helpful_kit-1.0.dist-info", site / "helpful_kit-2.0.dist-info")
    assert composed() == [CLASS]


def test_an_editable_package_is_trusted_where_its_code_is(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "project"
    code.mkdir()
    os.rename(site / "helpful", code / "helpful")
    url = {"url": f"file://{code}", "dir_info": {"editable": True}}
    (site / "helpful_kit-1.0.dist-info/direct_url.json").write_text(json.dumps(url))
    monkeypatch.syspath_prepend(str(code))
    trust(call("trust", CLASS))
    assert composed() == [CLASS]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("os.system", "never trusted"),
        ("torch", "the class that you need"),
        ("ddpexp.train", "no trust"),
        ("nowhere.Net", "module nowhere"),
        ("helpful-kit", "package.Class"),
        ("helpful_kit", "module helpful_kit"),
        ("run.trust=[helpful]", "package.Class"),
        ("--force", "--remove, --help"),
    ],
)
def test_what_cannot_be_trusted_is_refused(site: Path, name: str, word: str) -> None:
    with refused(f"trust {name}: {word}"):
        trust(call("trust", name))
    assert not trusted.list_file().exists()


@pytest.mark.fault("S19")
def test_a_list_that_others_can_write_or_that_is_damaged_counts_for_nothing(site: Path) -> None:
    trust(call("trust", CLASS))
    path = trusted.list_file()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    with refused("trusted.json: chmod 600"):
        composed()
    path.chmod(0o600)
    path.write_text("[")
    for command in (lambda: trust(call("trust")), composed):
        with refused("trusted.json: cannot be read"):
            command()


def test_removing_what_is_not_trusted_names_what_is(site: Path) -> None:
    with refused("trust --remove helpful: nothing is"):
        trust(call("trust", "--remove", "helpful"))
    trust(call("trust", CLASS))
    with refused(f"trust --remove helpful: {CLASS} is"):
        trust(call("trust", "--remove", "helpful"))
    with refused("trust --remove: ddpexp trust"):
        trust(call("trust", "--remove"))
