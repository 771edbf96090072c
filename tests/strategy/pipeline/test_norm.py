"""The norm of a gradient whose parameters lie on several workers: its host does not wait for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpexp.distributed.world import World
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.pipeline.strategy import Pipeline
from tests.fitting import ALONE
from tests.train.test_host_waits import META, Waits


class Launches(Waits):  # type: ignore[no-untyped-call]
    """Count the operations by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """The first of two stages with four of eight layers each, on torch's meta device; collectives keep its values."""
    unchanged = lambda world, tensor, *_: tensor  # noqa: E731
    monkeypatch.setattr(World, "sum", unchanged)
    monkeypatch.setattr(World, "broadcast", unchanged)
    monkeypatch.setattr("ddpexp.strategy.replica.check_same_models", lambda *_: None)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        world = replace(ALONE, world_size=2, local_world_size=2, device=META)
        layers = [nn.Linear(8, 8) for _ in range(8)]
        yield Pipeline(PipelineOptions("pipeline", 2, None, "1f1b"), world, lambda: nn.Sequential(*layers), 2)
    finally:
        dist.destroy_process_group()


def test_the_norms_of_other_stages_take_no_copy_from_the_host_and_one_launch(two_stages: Pipeline) -> None:
    parameters: list[Tensor] = list(two_stages.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with Launches() as launches:
        assert two_stages.gradient_norm(parameters).device == META
    assert launches.counts["zeros"] == 1
