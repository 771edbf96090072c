"""The folder given as --config-dir.

One of which nothing would be read is refused, with the one that is meant.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.config.compose import compose_command
from ddpexp.config.folders import config_dir_of
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.errors import RefusedError
from tests.refusals import refused


def made(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text("x: 1\n")
    return folder


def refusal(typed: str) -> str:
    with pytest.raises(RefusedError) as caught:
        config_dir_of(typed)
    return str(caught.value)


def test_a_folder_with_an_option_of_a_group_is_taken(tmp_path: Path) -> None:
    assert config_dir_of(None) is None
    for number, name in enumerate(
        ("recipe/mine.yaml", "model/net.yaml", "experiment/big.yaml", "hydra/sweeper/mine.yaml")
    ):
        folder = made(tmp_path / str(number), name)
        assert config_dir_of(str(folder)) == folder


@pytest.mark.parametrize(
    ("names", "typed", "text"),
    [
        (
            ["own/conf/recipe/mine.yaml", "own/mine.py"],
            "own",
            "Type --config-dir own/conf.",
        ),
        (
            ["own/conf/config.yaml", "own/conf/model/a.yaml"],
            "own",
            "Type --config-dir own/conf.",
        ),
        (
            ["own/recipe/mine.yaml"],
            "own/recipe",
            "Type --config-dir own.",
        ),
        (
            ["own/"],
            "own",
            "it is empty. Options are files such as own/recipe/NAME.yaml",
        ),
        (["own/mine.py"], "own", "has Python files"),
        (
            ["own/mine.yaml"],
            "own",
            "mine.yaml lies in no folder",
        ),
        (["own/recipe/mine.yml"], "own", "must end in .yaml"),
        (["own/data/x.csv"], "own", "no YAML in it"),
    ],
)
def test_one_without_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], typed: str, text: str
) -> None:
    monkeypatch.chdir(made(tmp_path, *names))
    assert text in refusal(typed)


def test_no_folder_at_all_is_refused(tmp_path: Path) -> None:
    assert refusal("") == "--config-dir is empty: it takes the folder of your configs, such as --config-dir mine/conf."
    assert refusal(f"{tmp_path}/x") == f"--config-dir {tmp_path}/x is not a directory."
    made(tmp_path, "file")
    assert refusal(f"{tmp_path}/file") == f"--config-dir {tmp_path}/file is not a directory."


@pytest.mark.parametrize(
    "name", ["a,b", "a b", "it's", 'a"b', "a[b", "a{b}", "a=b", "a\\b", 'a\\"b', "$b", "(b", "#b", "ünï"]
)
def test_the_name_of_a_folder_may_have_characters_of_hydras_grammar(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "conf"
    (folder / "recipe").mkdir(parents=True)
    (folder / "recipe/mine.yaml").write_text("# @package _global_\ndefaults: [/recipe/mnist]\ntrainer: {seed: 77}\n")
    composed = compose_command(["--config-dir", str(folder), "recipe=mine"])
    assert isinstance(composed, ResolvedConfig)
    assert composed.values["trainer"]["seed"] == 77


def test_the_name_of_a_folder_that_holds_a_reference_is_refused(tmp_path: Path) -> None:
    (tmp_path / "${b}/recipe").mkdir(parents=True)
    (tmp_path / "${b}/recipe/mine.yaml").write_text("# @package _global_\n")
    with refused("/${b}: reference"):
        compose_command(["--config-dir", str(tmp_path / "${b}"), "recipe=mine"])
