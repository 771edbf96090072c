"""The norm of a gradient: row by row on CPUs and in exact sums, of whole tensors on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.norm import norm_of_rows, norm_of_tensors, row_norms
from ddpexp.strategy.replica import Replicas
from tests.fitting import ALONE, STRATEGY
from tests.train.test_fuse import Launches
from tests.train.test_host_waits import META

LAYERS = 20


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))


def launches(strategy: Replicas) -> int:
    """Return how many operations the norm of all gradients takes on a device."""
    parameters: list[Tensor] = list(strategy.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with Launches() as counted:
        strategy.gradient_norm(parameters)
    return int(counted.counts.total())


def test_the_norm_takes_few_launches_on_a_device_unless_its_order_matters() -> None:
    world = replace(ALONE, device=META)
    assert launches(DDP(STRATEGY, world, layers)) <= 3
    exact = Exact(STRATEGY, world, layers, gradient_accumulation_steps=1)
    assert launches(exact) > 2 * LAYERS
    assert launches(DDP(STRATEGY, ALONE, layers)) > 2 * LAYERS


@pytest.mark.parametrize(
    "gradients",
    [
        [torch.linspace(-3, 3, 84).view(12, 7), torch.tensor(2.0), torch.zeros(0, 3)],
        [torch.linspace(-3, 3, 84, dtype=torch.bfloat16), torch.linspace(0, 1, 40_000).view(1, -1)],
        [torch.linspace(-3, 3, 84, dtype=torch.float64).view(12, 7)],
        [torch.tensor([torch.inf, 1.0])],
        [torch.tensor([torch.nan, 1.0])],
    ],
)
def test_both_ways_give_the_same_norm(gradients: list[Tensor]) -> None:
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    expected = norm_of_rows([row_norms(gradient, dtype) for gradient in gradients])
    torch.testing.assert_close(norm_of_tensors(gradients, dtype), expected, equal_nan=True)
    assert norm_of_tensors([], dtype).item() == 0.0
