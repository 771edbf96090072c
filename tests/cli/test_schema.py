"""`ddpexp schema`: what editors complete and check YAML files with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from ddpexp.cli import verbs
from ddpexp.cli.schema import schema, schema_of
from ddpexp.config.folders import conf_folder
from ddpexp.errors import EXIT_DONE
from tests.listed import options
from tests.refusals import refused

GROUPS = ("trainer", "strategy", "launcher", "scheduler", "model", "data", "optimizer", "logger", "callbacks")


@cache
def described(group: str) -> Mapping[str, Any]:
    found = schema_of([group] if group else [])
    Draft7Validator.check_schema(found)
    return found


def problems(group: str, values: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(described(group)).iter_errors(values)]


@pytest.mark.parametrize("name", options("recipe"))
def test_every_recipe_of_ours_fits_it(name: str) -> None:
    assert problems("", yaml.safe_load((conf_folder() / f"recipe/{name}.yaml").read_text())) == []


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in options(group)])
def test_every_option_of_ours_fits_that_of_its_group(group: str, name: str) -> None:
    assert problems(group, yaml.safe_load((conf_folder() / f"{group}/{name}.yaml").read_text())) == []


@pytest.mark.parametrize(
    ("section", "values", "where"),
    [
        ("trainer", {"sead": 1}, "$.trainer"),
        ("trainer", {"seed": -1}, "$.trainer.seed"),
        ("trainer", {"epochs": "many"}, "$.trainer.epochs"),
        ("trainer", {"ema_decay": 1.0}, "$.trainer.ema_decay"),
        ("trainer", {"keep_best": "eval/loss"}, "$.trainer.keep_best"),
        ("trainer", {"timeout": {"init_seconds": 0}}, "$.trainer.timeout"),
        ("trainer", {"lora": {"match": "a", "rank": 0}}, "$.trainer.lora"),
        ("trainer", {"param_groups": [{"lr_scale": -1}]}, "$.trainer.param_groups"),
        ("data", {"validation_fraction": 1}, "$.data.validation_fraction"),
        ("data", {"collate": {}}, "$.data.collate"),
        ("data", {"block_size": 0}, "$.data.block_size"),
        ("strategy", {"bucket_cap": 1}, "$.strategy"),
        ("launcher", {"cpus_per_task": 0}, "$.launcher.cpus_per_task"),
        ("run", {"resume": "sometimes"}, "$.run.resume"),
        ("sweep", {"early_stop_factor": 1}, "$.sweep.early_stop_factor"),
    ],
)
def test_a_mistake_in_a_recipe_is_found_at_its_place(section: str, values: Any, where: str) -> None:
    found = problems("", {section: values})
    assert [problem.partition(":")[0] for problem in found] == [where]


def test_references_and_keys_of_a_kind_are_accepted() -> None:
    assert problems("", {
        "trainer": {"seed": "${oc.env:SEED}", "epochs": None, "param_groups": [{"match": "a", "weight_decay": 0}]},
        "data": {"prepare": "mnist", "root": "x", "anything": 1},
        "model": {"_target_": "mine.Net", "width": 3},
        "logger": {"mine": {"_target_": "mine.Logger"}},
    }) == []  # fmt: skip


def test_it_explains_keys_by_the_comments_in_conf() -> None:
    assert "random number" in described("")["properties"]["trainer"]["properties"]["seed"]["description"]
    assert described("launcher")["properties"]["max_restarts"]["description"]


def test_an_unknown_group_is_refused_with_the_nearest() -> None:
    with refused("schema: trainer?"):
        schema_of(["trainr"])


def test_the_verb_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema(verbs.BY_NAME["schema"].parse(["trainer"])) == EXIT_DONE
    assert json.loads(capsys.readouterr().out) == described("trainer")
