"""ddpexp's own parts by their keys, and by the names that they had."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddpexp.config import plugins, registry
from ddpexp.config.compare import compare
from ddpexp.config.compose import compose
from ddpexp.config.folders import conf_folder
from ddpexp.config.instantiate import Trust, locate
from ddpexp.config.parse import load, parse
from ddpexp.config.plugins import launcher_name
from tests.conftest import ROOT

KEPT = ROOT / "tests/kept"


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


def test_names_of_an_earlier_version_name_the_same_parts() -> None:
    text = (KEPT / "mnist/config.yaml").read_text()
    assert "_target_: ddpexp.launch." in text
    values, now = yaml_of(text), registry.with_keys(yaml_of(text))
    assert (now["launcher"]["_target_"], now["data"]["_target_"], now["data"]["prepare"]) == ("spawn", "mnist", "mnist")
    assert compare(values, now, []) == compare(now, values, []) == []
    assert load(text).launcher == load(text.replace("ddpexp.launch.launchers.local.Spawn", "spawn")).launcher


def images(**options: object) -> dict[str, object]:
    return {"run": {}, "data": {"_target_": "images", "prepare": "images", **options}}


@pytest.mark.parametrize("target", ["images", "ddpexp.data.images.load"])
def test_the_former_name_of_data_std_still_works(target: str) -> None:
    old = images(_target_=target, deviation=[0.3])
    assert registry.with_keys(old) == images(std=[0.3])
    assert compare(old, images(std=[0.3], deviation=None), []) == []
    assert registry.with_keys(images(std=[0.5], deviation=[0.3])) == images(std=[0.3])
    assert registry.with_keys(images(std=[0.5], deviation=None)) == images(std=[0.5])
    assert registry.with_keys({"data": {"_target_": "mine.load", "deviation": 1}})["data"]["deviation"] == 1


def test_a_former_name_of_an_option_is_reported() -> None:
    [warning] = registry.deprecation_warnings(images(), ["data=images", "data.deviation=[0.3]"])
    assert warning == "data.deviation is deprecated and will be removed in the next release: use data.std."
    assert registry.deprecation_warnings(images(), ["data=images", "data.std=[0.3]"]) == []
    assert registry.deprecation_warnings({"data": {"_target_": "mine.load"}}, ["data.deviation=1"]) == []


@pytest.mark.parametrize(
    ("former", "expected"),
    [
        ({"kind": "tensorboard"}, {"tensorboard": {"_target_": "tensorboard"}}),
        ({"kind": "none"}, {}),
        (
            {"tensorboard": {"_target_": "tensorboard"}, "rows": {"_target_": "a.B"}, "kind": "none"},
            {"rows": {"_target_": "a.B"}},
        ),
        ({"rows": {"_target_": "a.B"}}, {"rows": {"_target_": "a.B"}}),
        ({"kind": "wandb"}, {"kind": "wandb"}),  # for `parse` to refuse
    ],
)
def test_the_former_key_of_the_logger_still_works(former: dict[str, Any], expected: dict[str, Any]) -> None:
    assert registry.with_keys({"logger": former})["logger"] == expected
    [warning] = registry.deprecation_warnings({"logger": former}, ["logger.kind=none"])
    assert warning.startswith("logger.kind is deprecated and will be removed in the next release: use logger=")
    assert registry.deprecation_warnings({"logger": former}, ["logger=none"]) == []


def test_reading_a_configuration_of_our_own_parts_searches_no_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "_entry_points", lambda: pytest.fail("8 ms in each rank"))
    assert load((KEPT / "mnist/config.yaml").read_text()).logger == {}


def test_a_deprecated_override_is_taken_with_its_value() -> None:
    made = compose(["recipe=mnist", "data=images", "data.root=x", "data.deviation=[0.3]"])
    assert made is not None
    assert parse(made.values).data.options["std"] == (0.3,)
    assert "deviation" not in parse(made.values).data.options


def yaml_of(text: str) -> dict[str, object]:
    import yaml

    found: dict[str, object] = yaml.safe_load(text)
    return found
