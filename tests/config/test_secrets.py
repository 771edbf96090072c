"""A secret in a configuration: a reference in its text, in every key of every option, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpexp.config.compose import compose
from ddpexp.config.interpolations import resolved
from ddpexp.config.resolve import ResolvedConfig, text_of, text_with_facts
from ddpexp.config.stored import override_file
from ddpexp.errors import RefusedError
from ddpexp.system.secrets import masked, referenced
from ddpexp.system.yaml_text import load_yaml
from tests.config.test_restated import dumped, keys_of, planted

VALUE = "q5zk-planted-7wyx"
NAMED = {"DDPEXP_SECRETS": "PROJECT", "PROJECT": VALUE}


def places(base: dict[str, Any]) -> list[tuple[str, dict[str, Any], tuple[Any, ...]]]:
    return [found for found in keys_of(base) if isinstance(found[2][-1], str) and "*" not in found[2]]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NAMED.items():
        monkeypatch.setenv(name, value)


@pytest.mark.fault("S10")
@pytest.mark.usefixtures("named")
def test_in_every_key_of_every_option_it_becomes_a_reference_that_resolves_to_it(base: dict[str, Any]) -> None:
    found = places(base)
    assert len(found) > 400
    values: list[Any] = [VALUE, f"/data/{VALUE}/x", [f"a {VALUE}", {"b": VALUE}], "\\" + VALUE]
    for number, (name, tree, place) in enumerate(found):
        value = values[number % len(values)]
        text = text_of(planted({place[0]: tree[place[0]]}, place, value))
        assert VALUE not in text, f"{name}: {place}"
        node: Any = load_yaml(text)
        for key in place:
            node = node[key]
        assert resolved({"x": node})["x"] == value, f"{name}: {place}"


def typed(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))


def composed_or_refused(argv: list[str]) -> ResolvedConfig | str:
    """Return what a command composes, or why it is refused."""
    try:
        composed = compose(argv)
    except RefusedError as error:
        return str(error)
    return composed


def check_typed(base: dict[str, Any], every: int) -> tuple[int, int]:
    """Type the value for each key, as a shell hands it over; return how many were composed, and how many refused."""
    composed, refused = 0, 0
    for name, _, place in places(base)[::every]:
        group, _, option = name.partition("=")
        chosen = [] if name == "recipe=mnist" else [f"{group}=[{option}]" if group == "callbacks" else name]
        argv, notes = referenced([*chosen, f"++{typed(place)}=/a/{VALUE}/b"])
        assert notes == [f"{typed(place)} is written as ${{oc.env:PROJECT}}"]
        made = composed_or_refused(argv)
        if isinstance(made, str):
            refused += 1
            assert VALUE not in masked(made)
            continue
        composed += 1
        shown = "\n".join([made.text, *made.overrides, *map(masked, made.warnings)])
        assert VALUE not in shown, f"{name}: {place}"
    return composed, refused


@pytest.mark.fault("S10")
@pytest.mark.usefixtures("named")
def test_typed_for_a_key_it_is_in_no_text_of_the_configuration(base: dict[str, Any]) -> None:
    composed, refused = check_typed(base, 40)
    assert composed > refused


@pytest.mark.slow
@pytest.mark.usefixtures("named")
def test_typed_for_any_key_of_any_option_it_is_in_no_text(base: dict[str, Any]) -> None:
    composed, refused = check_typed(base, 1)
    assert composed > 300
    assert composed > refused


@pytest.mark.fault("S10")
@pytest.mark.usefixtures("named")
def test_a_fact_of_the_data_becomes_a_reference_too() -> None:
    text = text_with_facts("model:\n  first: ${facts:classes.0}\n", {"classes": [VALUE, "cat"]})
    assert load_yaml(text) == {"model": {"first": "${oc.env:PROJECT}"}}


@pytest.mark.fault("S10")
@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (f"+task.{VALUE}=1", "The key task.${PROJECT} holds the value of PROJECT"),
        ("+data.url=https://me:by-hand-7@host/x", "data.url=https://me:***@host/x holds a password in a URL"),
        ("+data.url='https://host/x?token=by-hand-7'", "data.url=https://host/x?token=*** holds a password in a URL"),
    ],
)
def test_what_no_reference_can_stand_for_is_refused(override: str, sentence: str) -> None:
    refusal = composed_or_refused(["recipe=mnist", override])
    assert isinstance(refusal, str)
    assert sentence in refusal


@pytest.mark.fault("S10")
@pytest.mark.usefixtures("named")
def test_in_a_list_that_is_typed_for_a_stored_configuration_a_reference_is_read(
    base: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(dumped(base))
    argv, _ = referenced([f"trainer.freeze=[{VALUE},a-{VALUE}, 'b',c]"])
    values, text = override_file(tmp_path / "config.yaml", argv, ("launcher", "logger"))
    assert values["trainer"]["freeze"] == [VALUE, f"a-{VALUE}", "b", "c"]
    assert load_yaml(text)["trainer"]["freeze"] == ["${oc.env:PROJECT}", "a-${oc.env:PROJECT}", "b", "c"]
