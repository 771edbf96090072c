"""Where the first start of a run chooses a fused optimizer, and that later ones keep its choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ddpexp.config.compose import compose
from ddpexp.config.fused import KEY, is_fused, resolve
from ddpexp.config.parse import parse
from ddpexp.config.schema import Experiment
from ddpexp.settings.node import Node
from tests.refusals import refused


def experiment(*overrides: str) -> Experiment:
    made = compose(["recipe=mnist", *overrides])
    return parse(made.values)


@pytest.mark.parametrize(
    ("overrides", "device", "before", "found"),
    [
        ((), "cuda", None, {KEY: True}),
        ((), "cpu", None, {KEY: False}),
        (("optimizer=adamw",), "cuda", None, {KEY: True}),
        (("optimizer=adam",), "cuda", None, {KEY: True}),
        (("optimizer=muon",), "cuda", None, {}),
        (("optimizer.fused=false",), "cuda", None, {}),
        (("optimizer.fused=true",), "cpu", None, {}),
        (("optimizer.fused=null",), "cuda", None, {}),
        (("+optimizer.foreach=true",), "cuda", None, {KEY: False}),
        (("+optimizer.dampening=0.1", "optimizer.nesterov=false"), "cuda", None, {KEY: False}),
        (("strategy=fsdp", "strategy.offload=true"), "cuda", None, {KEY: False}),
        ((), "cpu", {"resolved": {KEY: True}}, {KEY: True}),
        ((), "cuda", {"resolved": {KEY: False}}, {KEY: False}),
        ((), "cuda", {"world": {}}, {KEY: False}),  # of an older version
        ((), "cuda", {"resolved": ["damaged"]}, {KEY: False}),
    ],
)
def test_the_first_start_of_a_run_decides(
    overrides: tuple[str, ...], device: str, before: Mapping[str, Any] | None, found: dict[str, bool]
) -> None:
    assert resolve(experiment(*overrides), device, before) == found


def test_what_the_user_has_typed_since_is_not_what_a_manifest_records() -> None:
    manifest = {"resolved": {KEY: True}}
    assert is_fused(experiment().optimizer, manifest)
    assert not is_fused(experiment("optimizer.fused=null").optimizer, manifest)


def test_another_class_does_not_get_the_key_of_the_option_it_was_made_of() -> None:
    changed = experiment("optimizer._target_=torch.optim.NAdam", "optimizer.lr=0.1", "+optimizer.fused=auto")
    assert changed.optimizer == Node("torch.optim.NAdam", {"lr": 0.1})


def test_another_value_is_refused() -> None:
    with refused("optimizer.fused=always: auto, true, false or null"):
        experiment("optimizer.fused=always")
