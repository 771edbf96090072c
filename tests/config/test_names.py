"""Whether what a configuration names is there, without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.config.instantiate import Trust
from ddpexp.config.names import check_present
from ddpexp.errors import RefusedError
from tests.refusals import refused

CODE = """\
raise RuntimeError("nobody may import this")
import os.path
from torch import nn as layers
try:
    from fast import Layer
except ImportError:
    class Layer: ...
if layers:
    def build(): ...
Net = Other = build
Pair, (Third, *Rest) = 1, (2, 3)
Typed: type = int
class Outer:
    class Inner: ...
    def method(self): ...
"""
FILES = {
    "mine.py": CODE,
    "shapes/__init__.py": "from shapes.nets import Net\n",
    "shapes/nets.py": "class Net: ...\n",
    "shapes/deep/nets.py": "class Net: ...\n",  # a folder without __init__.py
    "lazy.py": "def __getattr__(name): return 3\n",
    "stars.py": "from os.path import *\n",
    "made.py": "globals()['Net'] = int\n",
    "broken.py": "class Net(\n",
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


THERE = (
    "mine.Net", "mine.Other", "mine.Layer", "mine.build", "mine.Pair", "mine.Third", "mine.Rest", "mine.Typed",
    "mine.Outer.Inner",
    "mine.layers.Linear", "mine.os.getcwd", "shapes.Net", "shapes.nets.Net", "shapes.deep.nets.Net", "lazy.Net",
    "stars.join",
    "made.Net", "broken.Net",
)  # fmt: skip
ABSENT = [
    ("mine.Nett", "Did you mean Net?"),
    ("mine.method", "Available: Layer, build, Net, Other, Pair, Third, Rest, Typed, Outer."),
    ("mine.Inner", "Available: "),
    ("shapes.nets.Nets", "Did you mean Net?"),
    ("shapes.net.Net", "Did you mean Net?"),
    ("shapes.deep.net.Net", ""),
]


@pytest.mark.parametrize("target", THERE)
@pytest.mark.parametrize("where", ["model", "data.prepare"])
def test_what_is_there_passes(code: Path, target: str, where: str) -> None:
    section, _, key = where.partition(".")
    check_present({"data": {}, section: {key or "_target_": target, "inner": [{"_target_": target}]}}, Trust(code=code))


@pytest.mark.parametrize(("target", "suggestion"), ABSENT)
def test_what_is_not_there_is_refused_with_the_nearest(code: Path, target: str, suggestion: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_present({"model": {"inner": [{"_target_": target}]}}, Trust(code=code))
    assert (caught.value.key, caught.value.value) == ("model.inner[0]._target_", target)
    assert caught.value.suggestion.startswith(suggestion)
    with refused(f"data.prepare={target}"):
        check_present({"data": {"prepare": target}}, Trust(code=code))


def test_a_trusted_package_is_looked_into_where_python_finds_it(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(code))
    trust = Trust(("shapes", "json"))
    check_present({"model": {"_target_": "shapes.nets.Net"}, "task": {"_target_": "json.JSONEncoder"}}, trust)
    with refused("model._target_=shapes.nets.Nets: nets.py"):
        check_present({"model": {"_target_": "shapes.nets.Nets"}}, trust)
    with refused("model._target_=json.JSONEncode: JSONEncoder?"):
        check_present({"model": {"_target_": "json.JSONEncode"}}, trust)


def test_what_is_not_trusted_is_somebody_elses_to_refuse(code: Path) -> None:
    check_present({"model": {"_target_": "mine.Nett"}, "task": {"_target_": 3}}, Trust())
    check_present({"model": {"_target_": "nowhere.Net"}}, Trust(("nowhere",)))
