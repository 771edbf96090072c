"""Collectives that a recipe's code must not call are refused before any rank waits, whatever torch calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpexp.errors import DdpexpError
from ddpexp.train.collectives import CollectiveGuard, TaskCollectives, explained, refuse_in_callback
from tests.refusals import refused

differentiable: Any = torch.distributed.nn.functional
ONE, TWO = torch.zeros(2), [torch.zeros(2), torch.zeros(2)]
CALLS: dict[str, Callable[[], object]] = {
    "all_gather": lambda: dist.all_gather(TWO, ONE),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(4), ONE),
    "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
    "all_reduce": lambda: dist.all_reduce(ONE),
    "all_to_all": lambda: dist.all_to_all(TWO, TWO),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(2), ONE),
    "barrier": dist.barrier,
    "broadcast": lambda: dist.broadcast(ONE, 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "gather": lambda: dist.gather(ONE, TWO),
    "irecv": lambda: dist.irecv(ONE, 1),
    "isend": lambda: dist.isend(ONE, 1),
    "recv": lambda: dist.recv(ONE),
    "reduce": lambda: dist.reduce(ONE, 0),
    "reduce_scatter": lambda: dist.reduce_scatter(ONE, TWO),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ONE, torch.zeros(4)),
    "scatter": lambda: dist.scatter(ONE, TWO),
    "send": lambda: dist.send(ONE, 1),
}


SUMS = ("all_reduce", "reduce", "barrier")  # of which a buffer may be made, which has no gradient
GRADIENTS: dict[str, Callable[[], object]] = {
    "all_gather": lambda: differentiable.all_gather(leaf()),
    "all_reduce": lambda: differentiable.all_reduce(leaf()),
    "all_to_all": lambda: differentiable.all_to_all(TWO, [leaf(), leaf()]),
    "broadcast": lambda: differentiable.broadcast(leaf(), 0),
    "reduce": lambda: differentiable.reduce(leaf(), 0),
    "reduce_scatter": lambda: differentiable.reduce_scatter(torch.zeros(2), [leaf(), leaf()]),
    "sum in place": lambda: dist.all_reduce(leaf() * 1),
    "functional gather": lambda: functional.all_gather_tensor(torch.zeros(2), 0, group()),
    "functional sum": lambda: functional.all_reduce(leaf(), "sum", group()),
}


def group() -> Any:
    return dist.group.WORLD


def leaf() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


class Steps:
    """A task whose functions do what a batch says."""

    def step(self, model: Any, batch: Callable[[], Any]) -> Any:
        return batch()

    def counts(self, batch: Callable[[], Any]) -> Any:
        return batch()

    def finish(self, sums: Callable[[], Any]) -> Any:
        return sums()

    def on_eval(self, model: Any, batch: Callable[[], Any], logger: Any, step: int) -> Any:
        return batch()

    def train_step(self, update: Any, batches: list[Callable[[], Any]]) -> Any:
        return batches[0]()


class Embeds:
    """The same with a loss over the global batch."""

    def embed(self, model: Any, batch: Callable[[], Any]) -> Any:
        return batch()

    def loss(self, model: Any, embeddings: Callable[[], Any]) -> Any:
        return embeddings()


@pytest.fixture
def guard() -> Iterator[CollectiveGuard]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    guard = CollectiveGuard.installed()
    yield guard
    guard.on_call = None
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names of older versions of torch
@pytest.mark.parametrize("name", CALLS)
def test_a_collective_is_refused_in_a_callback_and_for_one_of_several_micro_batches(
    guard: CollectiveGuard, name: str
) -> None:
    guard.on_call = refuse_in_callback
    with refused("collective", DdpexpError):
        CALLS[name]()
    guard.on_call = None
    if name not in SUMS:
        with TaskCollectives(Steps(), {"model": nn.Linear(1, 1)}, (2, 4)).watched():
            with refused(": for one of several micro-batches", DdpexpError) as error:
                Steps().step(None, CALLS[name])
            assert "embed and loss" in error.value.suggestion
            assert "trainer.micro_batch_size=4" in error.value.suggestion
            assert f"{__file__}:" in str(error.value.place)


@pytest.mark.filterwarnings("ignore:.*autograd:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", GRADIENTS)
def test_one_through_which_gradients_pass_is_refused_for_one_of_several_micro_batches(
    guard: CollectiveGuard, name: str
) -> None:
    with (
        TaskCollectives(Steps(), {"model": nn.Linear(1, 1)}, (2, 4)).watched(),
        refused(": for one of several micro-batches", DdpexpError),
    ):
        Steps().step(None, GRADIENTS[name])


@pytest.mark.parametrize(
    ("sizes", "name", "number"),
    [
        ((4, 4), "all_gather", 1),
        ((2, 4), "all_reduce", 1),
        ((4, 4), "all_reduce", 0),  # that of the global batch
        ((2, 4), "barrier", 0),
    ],
)
def test_one_that_is_possible_is_reported_once(
    guard: CollectiveGuard, sizes: tuple[int, int], name: str, number: int
) -> None:
    reports: list[str] = []
    with TaskCollectives(Steps(), {"model": nn.Linear(1, 1)}, sizes, reports.append).watched():
        Steps().train_step(None, [CALLS[name]])
        CALLS[name]()  # not of the task at all
        assert not reports
        for _ in range(2):
            Steps().step(None, CALLS[name])
    assert len(reports) == number
    assert all(f"Steps.step ({__file__}:" in sentence and "embed and loss" in sentence for sentence in reports)
    assert guard.on_call is None


@pytest.mark.parametrize("name", ["counts", "finish", "on_eval", "embed", "loss", "step in an evaluation"])
def test_functions_that_must_not_communicate_are_named(guard: CollectiveGuard, name: str) -> None:
    task = Embeds() if name in ("embed", "loss") else Steps()
    model = nn.Linear(1, 1).train(not name.endswith("evaluation"))
    call = CALLS["all_reduce"]
    arguments = {"counts": (call,), "finish": (call,), "on_eval": (None, call, None, 0)}.get(name, (None, call))
    with (
        TaskCollectives(task, {"model": model}).watched(),
        refused(": an evaluation" if name.startswith("step") else ": must not communicate", DdpexpError) as error,
    ):
        getattr(task, name.partition(" ")[0])(*arguments)
    assert f".{name.partition(' ')[0]} (" in str(error.value.place)


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "barrier", "broadcast", "get_rank"])
def test_a_collective_without_a_process_group_is_explained(name: str) -> None:
    calls = {**CALLS, "get_rank": dist.get_rank}
    with refused(": one worker has none", DdpexpError) as error, explained():
        calls[name]()
    assert "embed and loss" in error.value.suggestion
    assert "update.world" in error.value.suggestion
