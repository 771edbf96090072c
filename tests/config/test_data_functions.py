"""How `load` and `prepare` of a recipe are called, and what `prepare` returns: whoever writes it otherwise is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpexp.config.data_functions import Description, check_description, check_takes_description, check_takes_keys
from ddpexp.data.datasets import Splits
from tests.refusals import refused

KEYS = {"folder": "pets", "size": 64}


def of_mapping(options: Any) -> None: ...
def of_nothing() -> None: ...
def of_one(size: int) -> None: ...
def of_more(folder: str, size: int, depth: int) -> None: ...
def right(folder: str, size: int = 32, depth: int = 2) -> None: ...
def of_any(**keys: Any) -> None: ...
def of_description(prepared: Any) -> None: ...
def of_both(prepared: Any, folder: str, size: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (of_mapping, "def of_mapping(folder, size), without the argument options"),
        (of_nothing, "~data.folder ~data.size"),
        (of_one, "~data.folder"),
        (of_more, "data.depth"),
    ],
)
def test_a_function_that_does_not_take_the_keys_is_answered_with_its_definition(
    function: Callable[..., Any], expected: str
) -> None:
    target = f"mine.{function.__name__}"
    with refused(f"data.prepare={target}: {expected}"):
        check_takes_keys(function, KEYS, "data.prepare", target)


def test_a_load_without_prepare_is_told_when_there_is_a_description() -> None:
    with refused("data.sources.pets._target_=mine.load: data.sources.pets.prepare"):
        check_takes_keys(of_description, KEYS, "data.sources.pets._target_", "mine.load")


@pytest.mark.parametrize("function", [of_both, of_nothing, of_any, of_one])
def test_a_load_that_does_not_take_the_description_is_answered_with_its_definition(
    function: Callable[..., Any],
) -> None:
    target = f"mine.{function.__name__}"
    with refused(f"data._target_={target}: def {function.__name__}(prepared)"):
        check_takes_description(function, KEYS, "mine.prepare", target)


def test_functions_of_the_contract_are_accepted() -> None:
    for function in (right, of_any):
        check_takes_keys(function, KEYS, "data.prepare", "mine.prepare")
    check_takes_description(of_description, KEYS, "mine.prepare", "mine.load")
    returned = {"name": "pets", "hash": "1", "shape": (1, 2), "facts": {"classes": ["cat"]}, "mean": [0.5, None]}
    assert check_description(returned, "mine.prepare") is returned


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, "returned None"),
        ([1], "returned a list"),
        ({"hash": "1"}, "without a name"),
        ({"name": 3}, "without a name"),
        (Splits([1], {}), "data sets themselves"),
        ({"name": "pets", "facts": [1]}, "facts"),
        ({"name": "pets", "count": np.int64(3)}, "in which count is an int64"),
        ({"name": "pets", "of": [{"mean": torch.zeros(2)}]}, "in which of[0].mean is a tensor"),
        ({"name": "pets", "folder": Path()}, "str(path)"),
        ({"name": "pets", "counts": {0: 1}}, "the key 0"),
    ],
)
def test_what_prepare_should_not_return_is_named_with_its_place(returned: Any, expected: str) -> None:
    with refused(f"data.prepare=mine.prepare: {expected}"):
        check_description(returned, "mine.prepare")


def test_a_key_that_prepare_has_not_returned_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match="which has name, hash"):
        Description({"name": "pets", "hash": "1"})["size"]
