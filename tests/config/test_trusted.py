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


def refused(*argv: str) -> str:
    with pytest.raises(RefusedError) as caught:
        trust(call("trust", *argv))
    return str(caught.value)


def test_a_class_that_is_trusted_once_needs_no_override(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RefusedError) as caught:
        composed()
    sentence = (
        f" If this code is yours, add run.trust=[helpful]. To trust it once for all commands: ddpexp trust {CLASS}."
    )
    assert str(caught.value).endswith(sentence)
    assert trust(call("trust", CLASS)) == 0
    assert capsys.readouterr().out == f"{CLASS} of helpful-kit 1.0 ({site / 'helpful'}) is trusted.\n"
    assert composed() == [CLASS]
    with pytest.raises(RefusedError, match="Careless is not allowed"):
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
    with pytest.raises(RefusedError) as caught:
        composed()
    assert f" It is trusted at {site / 'helpful'}, and here it is {stranger / 'helpful'}: " in str(caught.value)
    assert "which is not where the package helpful-kit is installed" in refused("helpful")


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
    ("name", "sentence"),
    [
        ("os.system", "trust os.system: Python's own modules can run any program, so they are never trusted."),
        ("torch", "trust torch: Functions of it can load files that run code. Name the class that you need, in full."),
        ("ddpexp.train", "trust ddpexp.train: Classes and functions of ddpexp need no trust."),
        ("nowhere.Net", "trust nowhere.Net: There is no installed package with a module nowhere."),
        ("helpful-kit", "trust helpful-kit: use the name of a package, or of a class in it, such as package.Class."),
        ("helpful_kit", "trust helpful_kit: There is no installed package with a module helpful_kit."),
        ("run.trust=[helpful]", "trust run.trust=[helpful]: The command takes names"),
        ("--force", "trust --force is not an option. Available: --remove, --help."),
    ],
)
def test_what_cannot_be_trusted_is_refused(site: Path, name: str, sentence: str) -> None:
    assert refused(name).startswith(sentence)
    assert not trusted.list_file().exists()


@pytest.mark.fault("S19")
def test_a_list_that_others_can_write_or_that_is_damaged_counts_for_nothing(site: Path) -> None:
    trust(call("trust", CLASS))
    path = trusted.list_file()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    with pytest.raises(RefusedError, match="others can write it"):
        composed()
    path.chmod(0o600)
    path.write_text("[")
    assert "cannot be read" in refused()
    with pytest.raises(RefusedError, match="cannot be read"):
        composed()


def test_removing_what_is_not_trusted_names_what_is(site: Path) -> None:
    assert refused("--remove", "helpful") == "trust --remove helpful: The name is not trusted; nothing is."
    trust(call("trust", CLASS))
    assert refused("--remove", "helpful") == f"trust --remove helpful: The name is not trusted; {CLASS} is."
    assert refused("--remove").startswith("trust --remove: name what")
