"""Collectives that a callback calls are refused before any rank waits, whatever torch calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpexp.errors import DdpexpError
from ddpexp.train.callbacks.collectives import CollectiveGuard
from tests.refusals import refused

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


@pytest.fixture
def guard() -> Iterator[CollectiveGuard]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    guard = CollectiveGuard.installed()
    yield guard
    guard.forbids = False
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names of older versions of torch
@pytest.mark.parametrize("name", CALLS)
def test_a_collective_is_refused(guard: CollectiveGuard, name: str) -> None:
    guard.forbids = True
    with refused("collective", DdpexpError):
        CALLS[name]()
