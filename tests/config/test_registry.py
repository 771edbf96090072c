"""ddpexp's own parts by their keys."""

from __future__ import annotations

import re

import pytest

from ddpexp.config import plugins, registry
from ddpexp.config.folders import conf_folder
from ddpexp.config.instantiate import Trust, locate
from ddpexp.config.parse import load
from ddpexp.config.plugins import launcher_name
from tests.conftest import ROOT

SAMPLES = ROOT / "tests/samples"


@pytest.mark.parametrize("section", ["launcher", "scheduler", "data", "data.prepare"])
def test_every_part_is_where_the_registry_says_and_has_an_option_of_its_name(section: str) -> None:
    group = section.partition(".")[0]
    options = {path.stem for path in (conf_folder() / group).iterdir()}
    if section == "data.prepare":
        options.remove("mixture")  # which prepares each of its sources as its own kind does
    if section == "scheduler":
        options.remove("cifar10")  # a recipe's values for another option's schedule
    for key in registry.keys_of(section):
        found = locate(key, Trust(), section)
        assert f"{found.__module__}.{found.__qualname__}" == registry.path_of(section, key)
        text = (conf_folder() / group / f"{key}.yaml").read_text()
        assert re.search(rf"^{section.partition('.')[2] or '_target_'}: {key}$", text, re.MULTILINE)
    assert set(registry.keys_of(section)) == options
    assert not Trust().allows(registry.keys_of(section)[0], "model")


def test_a_launcher_is_chosen_by_its_key() -> None:
    for key in registry.keys_of("launcher"):
        assert launcher_name(locate(key, Trust(), "launcher")) == key


def test_reading_a_configuration_of_our_own_parts_searches_no_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "_entry_points", lambda: pytest.fail("8 ms in each rank"))
    assert load((SAMPLES / "mnist/config.yaml").read_text()).logger == {}
