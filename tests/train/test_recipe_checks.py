"""What a recipe's own functions give is named, with what belongs there, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.loggers.base import Logger, LoggerCollection
from ddpexp.train.process import message_or_place
from ddpexp.train.recipe_checks import (
    check_logger,
    check_model,
    check_optimizers,
    check_signature,
    check_splits,
    check_takes_directory,
    check_task,
)
from tests.refusals import located, refused


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Bare:
    def __len__(self) -> int:
        return 3


class Endless(IndexData):
    def fetch(self, indices: Tensor, pinned: bool = False) -> Tensor:
        return indices


class Gathers(IndexData):
    def __len__(self) -> int:
        return 3

    def gather(self, indices: Tensor, device: torch.device) -> Tensor:
        return indices


def refusal(check: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        check(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


MAP_STYLE = "a data set needs __len__ and __getitem__ (map-style)."
SPLITS = [
    (Splits(DataLoader(Stream()), {}), ": `train` is a DataLoader. "),
    (Splits([1], {"eval": DataLoader(Stream())}), ": `eval` is a DataLoader. "),
    (Splits(Stream(), {}), f": `train` is a Stream: {MAP_STYLE}"),
    (Splits(Bare(), {}), f": `train` is a Bare: {MAP_STYLE} One that makes batches inherits from ddpexp.data.base."),
    (Splits(Endless(), {}), ": `train` is Endless, an IndexData without __len__. "),
    (Splits([1], {"eval": Gathers()}), ": `eval` is Gathers, an IndexData without fetch or __getitem__. "),
    (Splits(iter([1]), {}), f": `train` is a list_iterator: {MAP_STYLE}"),
    (Splits([1], [[2]]), " gave a list of 1 as evals, where a mapping of names to data sets belongs: "),  # type: ignore[arg-type]
    (Splits([1], None), " gave None as evals, where a mapping of names to data sets belongs: "),  # type: ignore[arg-type]
    (Splits([], {}), " returned no samples for `train`."),
    (([1], {}), " must return ddpexp.data.datasets.Splits, not tuple."),
]


@pytest.mark.parametrize(("splits", "sentence"), SPLITS)
def test_what_a_data_function_returns_is_named(splits: Any, sentence: str) -> None:
    assert refusal(check_splits, splits, "mine.load").startswith(f"data._target_=mine.load{sentence}")


def test_data_that_can_be_read_by_index_is_accepted() -> None:
    found = check_splits(Splits([1, 2], {"eval": range(3), "part": Subset([1, 2, 3], [2, 0])}), "mine.load")  # type: ignore[arg-type]
    sets = {"train": found.train, **found.evals}
    assert {name: [one[index] for index in range(len(one))] for name, one in sets.items()} == {
        "train": [1, 2], "eval": [0, 1, 2], "part": [3, 1],
    }  # fmt: skip
    assert [type(one.returned) for one in sets.values()] == [list, range, Subset]


BELONGS = "where a torch.nn.Module, or a mapping of them, belongs."
MODELS = [
    (None, f"model._target_=mine.build returned None, {BELONGS}"),
    ([nn.Linear(1, 1)], f"model._target_=mine.build returned a list of 1, {BELONGS}"),
    ({"net": None}, f"model._target_=mine.build returned None in a mapping, {BELONGS}"),
    ({}, f"model._target_=mine.build returned a dict, {BELONGS}"),
    (frozen(), "model._target_=mine.build returned a model of which no parameter requires a gradient, so there is"),
]


@pytest.mark.parametrize(("model", "sentence"), MODELS)
def test_what_a_model_function_returns_is_named(model: Any, sentence: str) -> None:
    assert refusal(check_model, model, "mine.build", trains=True).startswith(sentence)


def test_a_model_that_can_be_trained_is_accepted_and_a_frozen_one_can_be_evaluated() -> None:
    for model in (nn.Linear(1, 1), nn.Identity(), {"net": nn.Linear(1, 1), "teacher": frozen()}):
        assert check_model(model, "mine.build", trains=True) is model
    check_model(frozen(), "mine.build", trains=False)


class Empty:
    pass


class NoSelf:
    def step(model: Any, batch: Any) -> None:
        return None


class NoBatches(Empty):
    def train_step(self, update: Any) -> None:
        return None


class ByHand(Empty):
    def train_step(self, update: Any, batches: list[Any]) -> None:
        return None


class Tasked:
    def step(self, model: Any, batch: Any, scale: float = 1.0) -> None:
        return None

    def optimizers(self, model: Any, make: Any) -> None:
        return None


def test_a_task_that_the_loop_cannot_call_is_named_with_its_file_and_line() -> None:
    assert refusal(check_task, Empty(), "mine.Task", True).startswith(
        f"task._target_=mine.Task gave a {located(Empty)} without the method step(self, model, batch), which returns"
    )
    assert refusal(check_task, None, "mine.Task", True).startswith(
        "task._target_=mine.Task gave None without the method"
    )
    wrong: list[tuple[Any, Any, str]] = [
        (NoSelf(), NoSelf.step, "(model, batch). Write def step(self, model, batch)."),
        (NoBatches(), NoBatches.train_step, "(update, batches). Write def train_step(self, update, batches)."),
    ]
    for task, method, says in wrong:
        assert refusal(check_task, task, "mine.Task", True) == f"{located(method)} cannot be called with {says}"
    check_task(Tasked(), "mine.Task", True)
    check_task(ByHand(), "mine.Task", False)
    assert refusal(check_task, ByHand(), "mine.Task", True) == (
        f"task._target_=mine.Task gave a {located(ByHand)} with a train_step and without the method step(self, model, "
        "batch), which evaluations call. Add it, or set trainer.eval_every=0."
    )


def test_a_schedule_with_other_arguments_is_named_with_its_file_and_line() -> None:
    class Falling:
        def factor(self, step: int) -> float:
            return 1.0

    assert refusal(check_signature, Falling().factor, "factor", ("step", "num_steps")) == (
        f"{located(Falling.factor)} cannot be called with (step, num_steps). Write def factor(self, step, num_steps)."
    )


@pytest.mark.parametrize("several", [True, False])
def test_optimizers_without_names_are_refused(several: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    returned = "a list of 1" if several else "a SGD"
    assert refusal(check_optimizers, [optimizer] if several else optimizer, Tasked().optimizers) == (
        f"{located(Tasked.optimizers)} returned {returned}, where a mapping of names to optimizers belongs, such as "
        '{"name": optimizer}.'
    )
    assert check_optimizers({"net": optimizer}, Tasked().optimizers) == {"net": optimizer}


class Swapped(Logger):
    def scalars(self, values: object, step: int) -> None: ...  # type: ignore[override]


class NoStep(Logger):
    def position(self) -> dict[str, int]:
        return {}

    def truncate(self, position: object) -> None: ...


class Whole(Logger):
    def position(self) -> object:
        return object()

    def truncate(self, position: object, step: int) -> None: ...


@pytest.mark.parametrize(
    ("logger", "definition"),
    [
        (Swapped(), "def scalars(self, step, epoch, values)."),
        (NoStep(), "def truncate(self, position, step)."),
    ],
)
def test_a_logger_with_other_arguments_is_refused_before_training(logger: object, definition: str) -> None:
    with refused(f": {definition}"):
        check_logger(logger, "logger.mine._target_=mine.Logger")


def test_a_logger_that_takes_no_run_directory_gets_the_definition_that_does() -> None:
    def rows(file: str) -> None: ...

    with refused("logger.mine: def __init__(self, run_dir, file)."):
        check_takes_directory(rows, ["file"], "logger.mine")
    check_takes_directory(rows, ["flie"], "logger.mine")  # building it names the key
    check_takes_directory(lambda run_dir, file: None, ["file"], "logger.mine")


def test_a_position_that_is_no_mapping_is_reported_with_the_logger() -> None:
    with refused("Whole.position(): mapping", DdpexpError):
        LoggerCollection([Whole()]).position()


def test_an_assert_without_a_message_is_reported_with_its_place() -> None:
    with pytest.raises(AssertionError) as raised:
        exec(compile("assert 1 == 2", "mine.py", "exec"))
    assert message_or_place(raised.value).endswith("(mine.py:1)")
    assert message_or_place(ValueError("text")) == "text"
