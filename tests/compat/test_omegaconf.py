"""The private names of OmegaConf are there; libyaml reads what its own parser reads, and refuses it alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddpexp.compat.omegaconf import (
    Place,
    count_nodes,
    guarded_resolvers,
    observed_interpolations,
    quick_yaml,
    read_values,
    tree_of,
)
from ddpexp.config.folders import conf_folder

Load = Callable[[str], Any]
GOOD = {
    "numbers": "a: 1e-3\nb: 1e3\nc: .5\nd: 1_000\ne: 0x10\nf: 1:30\ng: .inf\nh: -7\ni: 1.\n",
    "texts": "a: 2024-01-01\nb: 'it''s'\nc: \"\\u00e9\"\nd: é\ne: |\n  x\n  y\nf: on\ng: ~\nh: yes\n",
    "interpolations": 'a: ${b}\nb: [1, {c: "${oc.env:HOME}"}]\nd: ???\n',
    "anchors": "a: &x {b: 1}\nc: *x\nd:\n  <<: *x\n  e: 2\n",
    "nothing": "",
    "a comment": "# @package _global_\n",
    "a list": "- 1\n- a: 2\n",
}
BAD = {
    "a bracket": "a: [1\nb: 2\n",
    "twice": "a: 1\na: 2\n",
    "an object": 'a: !!python/object/apply:os.system ["x"]\n',
    "a tab": "a:\n\tb: 1\n",
    "a character": "a: \x01\n",
}


@pytest.fixture(params=["text", "file"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    def of_file(text: str) -> object:
        (tmp_path / "some.yaml").write_text(text)
        return OmegaConf.load(tmp_path / "some.yaml")

    return of_file if request.param == "file" else OmegaConf.create


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_the_values_are_the_same(load: Load, text: str) -> None:
    slow = load(text)
    with quick_yaml():
        assert load(text) == slow


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_the_texts_are_the_same(load: Load, text: str) -> None:
    with pytest.raises(yaml.YAMLError) as slow:
        load(text)
    with quick_yaml(), pytest.raises(yaml.YAMLError) as quick:
        load(text)
    assert (type(quick.value), str(quick.value)) == (type(slow.value), str(slow.value))


def test_our_own_files_are_read_by_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:
        raise AssertionError

    paths = sorted(conf_folder().glob("**/*.yaml"))
    expected = [OmegaConf.load(path) for path in paths]
    monkeypatch.setattr(yaml.scanner.Scanner, "fetch_more_tokens", slow)
    with quick_yaml():
        assert [OmegaConf.load(path) for path in paths] == expected


def test_each_interpolation_is_observed_and_then_none() -> None:
    cfg, seen = OmegaConf.create({"a": 1, "b": "${a}", "c": "x${b}"}), list[object]()
    with observed_interpolations(seen.append):
        assert cfg.c == "x1"
    assert cfg.b == 1
    assert [getattr(value, "_value", lambda v=value: v)() for value in seen] == [1, "x1"]


def test_a_resolver_is_called_only_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "value")
    cfg = OmegaConf.create({"a": [{"b": "${oc.env:NAME}"}], "c": "${oc.env:NAME}"})
    seen = []

    def evaluate(resolver: str, arguments: tuple[Any, ...], place: Place, call: Callable[[], Any]) -> Any:
        seen.append((resolver, arguments, place))
        return call() if place == ("c",) else "refused"

    with guarded_resolvers(evaluate):
        assert OmegaConf.to_container(cfg, resolve=True) == {"a": [{"b": "refused"}], "c": "value"}
    assert seen == [("oc.env", ("NAME",), ("a", 0, "b")), ("oc.env", ("NAME",), ("c",))]


def test_the_nodes_of_a_tree_are_counted_without_being_resolved() -> None:
    cfg = OmegaConf.create({"a": [1, 2, {"b": "${nowhere}"}], "c": None})
    assert count_nodes(cfg, 100) == 6
    assert count_nodes(cfg, 2) >= 2


def test_an_error_has_the_tree_that_it_is_about() -> None:
    cfg = OmegaConf.create({"a": [1, {"b": "${nowhere}"}], "c": None})
    with pytest.raises(OmegaConfBaseException) as error:
        OmegaConf.to_container(cfg, resolve=True)
    assert tree_of(error.value) == {"a": [1, {"b": "${nowhere}"}], "c": None}
    assert tree_of(OmegaConfBaseException("about nothing")) == {}


def test_one_value_is_read_as_in_a_file() -> None:
    assert read_values("1e-3") == 1e-3
