"""What a recipe's own functions give is named, with what belongs there, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.loggers.base import Logger
from ddpexp.loggers.collection import LoggerCollection
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


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


SPLITS = [
    (Splits(DataLoader(Stream()), {}), "`train` is a DataLoader"),
    (Splits([1], {"eval": DataLoader(Stream())}), "`eval` is a DataLoader"),
    (Splits(Stream(), {}), "`train` is a Stream: a data set needs __len__ and __getitem__"),
    (Splits(Bare(), {}), "class Bare(IndexData)"),
    (Splits(Endless(), {}), "`train` is Endless, an IndexData without __len__"),
    (Splits([1], {"eval": Gathers()}), "`eval` is Gathers, an IndexData without fetch or __getitem__"),
    (Splits(iter([1]), {}), "`train` is a list_iterator"),
    (Splits([1], [[2]]), "a list of 1 as evals"),  # type: ignore[arg-type]
    (Splits([1], None), "None as evals"),  # type: ignore[arg-type]
    (Splits([], {}), "no samples for `train`"),
    (([1], {}), "not tuple"),
]


@pytest.mark.parametrize(("splits", "expected"), SPLITS)
def test_what_a_data_function_returns_is_named(splits: Any, expected: str) -> None:
    with refused(f"data._target_=mine.load: {expected}"):
        check_splits(splits, "mine.load")


def test_data_that_can_be_read_by_index_is_accepted() -> None:
    found = check_splits(Splits([1, 2], {"eval": range(3), "part": Subset([1, 2, 3], [2, 0])}), "mine.load")  # type: ignore[arg-type]
    sets = {"train": found.train, **found.evals}
    assert {name: [one[index] for index in range(len(one))] for name, one in sets.items()} == {
        "train": [1, 2], "eval": [0, 1, 2], "part": [3, 1],
    }  # fmt: skip
    assert [type(one.returned) for one in sets.values()] == [list, range, Subset]


MODELS = [
    (None, "returned None"),
    ([nn.Linear(1, 1)], "returned a list of 1"),
    ({"net": None}, "returned None in a mapping"),
    ({}, "returned a dict"),
    (frozen(), "no parameter requires a gradient"),
]


@pytest.mark.parametrize(("model", "expected"), MODELS)
def test_what_a_model_function_returns_is_named(model: Any, expected: str) -> None:
    with refused(f"model._target_=mine.build: {expected}"):
        check_model(model, "mine.build", trains=True)


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
    wrong: list[tuple[Any, str]] = [
        (Empty(), f"task._target_=mine.Task: {located(Empty)} without the method step(self, model, batch)"),
        (None, "task._target_=mine.Task: None without the method step(self, model, batch)"),
        (NoSelf(), f"{located(NoSelf.step)}: def step(self, model, batch)."),
        (NoBatches(), f"{located(NoBatches.train_step)}: def train_step(self, update, batches)."),
        (ByHand(), f"task._target_=mine.Task: {located(ByHand)} with a train_step and without the method step"),
    ]
    for task, expected in wrong:
        with refused(expected):
            check_task(task, "mine.Task", True)
    check_task(Tasked(), "mine.Task", True)
    check_task(ByHand(), "mine.Task", False)


def test_a_schedule_with_other_arguments_is_named_with_its_file_and_line() -> None:
    class Falling:
        def factor(self, step: int) -> float:
            return 1.0

    with refused(f"{located(Falling.factor)}: def factor(self, step, num_steps)."):
        check_signature(Falling().factor, "factor", ("step", "num_steps"))


@pytest.mark.parametrize("several", [True, False])
def test_optimizers_without_names_are_refused(several: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    returned = "a list of 1" if several else "a SGD"
    with refused(f"{located(Tasked.optimizers)}: returned {returned}"):
        check_optimizers([optimizer] if several else optimizer, Tasked().optimizers)
    assert check_optimizers({"net": optimizer}, Tasked().optimizers) == {"net": optimizer}


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    class Rateless(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"radius": 0.1})

    optimizer = Rateless([nn.Parameter(torch.zeros(1))])
    with refused(f"{located(Tasked.optimizers)}: returned the optimizer 'net' ({Rateless.__qualname__}), whose"):
        check_optimizers({"net": optimizer}, Tasked().optimizers)


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


@pytest.mark.parametrize("flops", ["many", 0, -1.0, float("inf"), float("nan")])
def test_the_flops_of_a_sample_are_a_number_above_0(flops: Any) -> None:
    task = Tasked()
    task.flops_per_sample = flops  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match=r"flops_per_sample is .*, where a number above 0 belongs"):
        check_task(task, "mine.Task", True)
