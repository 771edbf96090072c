"""Plain values become typed ones, or a sentence that names the key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest

from ddpexp.config.build import build, convert, did_you_mean, nearest, unknown_key
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.parameters import ParamGroup
from tests.refusals import refused


@dataclass(frozen=True)
class Inner:
    depth: int


@dataclass(frozen=True)
class Section:
    count: int
    share: float
    flag: bool
    word: str
    choice: Literal["auto", "cpu", "cuda"]
    either: Literal["auto"] | int
    names: tuple[str, ...]
    maybe: float | None
    inner: Inner
    given: int = 7


GOOD: dict[str, Any] = {
    "count": 3,
    "share": 0.5,
    "flag": True,
    "word": "a",
    "choice": "cpu",
    "either": "auto",
    "names": ["a", "b"],
    "maybe": None,
    "inner": {"depth": 1},
}


def refusal(**changed: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        build(Section, {**GOOD, **changed}, "part")
    return str(caught.value)


def test_right_values_become_a_frozen_section() -> None:
    built = build(Section, GOOD, "part")
    assert built == Section(3, 0.5, True, "a", "cpu", "auto", ("a", "b"), None, Inner(1), 7)
    with pytest.raises(AttributeError):
        built.count = 4  # type: ignore[misc]


def test_a_field_for_the_other_keys_takes_one_of_its_own_name_too() -> None:
    built = build(ParamGroup, {"match": "*.bias", "settings": 3, "weight_decay": 0}, "group")
    assert built.settings == {"settings": 3, "weight_decay": 0}


def test_the_beginning_of_one_known_word_stands_for_it_and_that_of_several_for_none() -> None:
    assert nearest("log", ["log_every_n_steps", "seed"]) == "log_every_n_steps"
    assert nearest("log", ["log_every_n_steps", "log_interval_of_steps", "seed"]) is None


def test_a_whole_number_may_stand_for_a_float_but_not_the_other_way_round() -> None:
    assert build(Section, {**GOOD, "share": 1, "maybe": 2}, "part").share == 1.0
    assert isinstance(build(Section, {**GOOD, "maybe": 2}, "part").maybe, float)
    assert refusal(count=3.0) == "part.count=3.0 is not a whole number. Did you mean part.count=3?"
    assert refusal(count=3.5) == "part.count=3.5 is not a whole number."


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("count", "three", "part.count=three is not a whole number."),
        ("count", True, "part.count=true is not a whole number."),
        ("count", None, "part.count=null is not a whole number."),
        ("count", [1], "part.count=[1] is not a whole number."),
        ("share", "half", "part.share=half is not a number."),
        ("share", False, "part.share=false is not a number."),
        ("share", "10%", "part.share=10% is not a number. Did you mean part.share=0.1?"),
        ("count", "2k", "part.count=2k is not a whole number. Did you mean part.count=2000?"),
        ("flag", "2k", "part.flag=2k is not true or false."),
        ("flag", 1, "part.flag=1 is not true or false. Did you mean part.flag=true?"),
        ("flag", "yes", "part.flag=yes is not true or false. Did you mean part.flag=true?"),
        ("flag", "maybe", "part.flag=maybe is not true or false."),
        (
            "count",
            "3",
            "part.count='3' is a text, and the key takes a whole number. Leave out the quotes: part.count=3.",
        ),
        ("word", 5, "part.word=5 is not a text."),
        ("choice", "gpu", "part.choice=gpu is not one of auto, cpu, cuda. Did you mean part.choice=cpu?"),
        ("choice", "CPU", "part.choice=CPU is not one of auto, cpu, cuda. Did you mean part.choice=cpu?"),
        ("choice", "tpu9000", "part.choice=tpu9000 is not one of auto, cpu, cuda."),
        ("either", "two", "part.either=two is not auto or a whole number."),
        ("either", 1.5, "part.either=1.5 is not auto or a whole number."),
        ("either", True, "part.either=true is not auto or a whole number."),
        ("names", "a", "part.names=a is not a list, each item a text. Did you mean part.names=[a]?"),
        ("names", ["a", 1], "part.names=1 is not a text."),
        ("maybe", "x", "part.maybe=x is not a number or null."),
        (
            "inner",
            3,
            "part.inner=3 is not a section: it has the keys depth. Type one of them, for example part.inner.depth=3.",
        ),
        ("inner", {"dept": 3}, "part.inner.dept is not a known key. Did you mean part.inner.depth?"),
    ],
)
def test_for_a_wrong_type_the_error_has_the_key_the_value_and_the_expected_type(
    key: str, value: Any, sentence: str
) -> None:
    assert refusal(**{key: value}) == sentence


def test_true_is_not_taken_for_the_number_one_in_a_choice() -> None:
    with pytest.raises(RefusedError):
        convert(True, Literal[1, 2], "key")
    assert convert(1, Literal[1, 2], "key") == 1


def test_for_an_unknown_key_the_nearest_is_suggested() -> None:
    assert refusal(shar=1) == "part.shar is not a known key. Did you mean part.share?"
    listed = ", ".join(field.name for field in fields(Section))
    assert refusal(zzz=1) == f"part.zzz is not a known key. Available: {listed}."


def test_a_key_of_another_section_is_suggested_with_its_section() -> None:
    error = unknown_key("seed", ["count", "_hidden"], "part", ["trainer.seed", "trainer.epochs"])
    assert str(error) == "part.seed is not a known key. Did you mean trainer.seed?"
    assert "_hidden" not in str(unknown_key("zzz", ["count", "_hidden"], "part"))


def test_a_missing_key_is_named() -> None:
    with refused("part.count: in the recipe"):
        build(Section, {key: value for key, value in GOOD.items() if key != "count"}, "part")


def test_what_is_no_section_is_refused_with_the_keys_it_has() -> None:
    with refused("part=linear: depth"):
        build(Inner, "linear", "part")


def test_types_that_only_code_can_give_are_refused_without_a_crash() -> None:
    with pytest.raises(RefusedError):
        convert("x", Callable[[str], None], "key")
    assert convert(["x"], Sequence[str], "key") == ["x"]


def test_the_nearest_match_is_found_whatever_the_case_and_quoted_for_the_shell() -> None:
    assert did_you_mean("LeNett", ["lenet", "linear"], "model=") == "Did you mean model=lenet?"
    assert did_you_mean("trainr", ["trainer", "_private"], "", ".gpus") == "Did you mean trainer.gpus?"
    assert did_you_mean("q", []) == "Available: nothing."


def test_values_are_shown_as_in_an_override() -> None:
    assert [shown(value) for value in (None, True, 1.5, "a")] == ["null", "true", "1.5", "a"]
