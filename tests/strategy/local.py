"""Functions of tests/strategy/test_local.py that run on every rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.distributed.world import World
from ddpexp.strategy.local.options import DiLoCoOptions, LocalOptions
from ddpexp.strategy.local.strategy import DiLoCo, LocalSGD
from ddpexp.task import Sums

STEPS, WARMUP, EVERY = 9, 2, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = (module(batch).squeeze(1) - batch.sum(1)).square().mean()
    return result


class Step:
    """As much of a step as strategies use."""

    def __init__(self, strategy: LocalSGD, step: int) -> None:
        self.step, self._strategy = step, strategy

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[Step]:
        with self._strategy.micro_batch(last):
            yield self

    def forward(self, batch: Tensor) -> Sums:
        return loss_of(self._strategy.train_model, batch), 1, {}

    def backward(self, loss: Tensor, count: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def apply(self) -> bool:
        for optimizer in self._strategy._optimizers.values():
            optimizer.step()
        return True


def by_hand(world_size: int, outer: tuple[float, float] | None) -> list[nn.Module]:
    """Return the models of all ranks, which this one trains in turn."""
    models = [model() for _ in range(world_size)]
    optimizers = [optimizer_of(module) for module in models]
    target = list(model().parameters())
    outer_optimizer = torch.optim.SGD(target, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0) if outer else None
    for step in range(STEPS):
        for rank, module in enumerate(models):
            optimizers[rank].zero_grad()
            loss_of(module, rows(step, rank)).backward()  # type: ignore[no-untyped-call]
        if step < WARMUP:
            for parameters in zip(*(module.parameters() for module in models), strict=True):
                mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step + 1 == WARMUP:
            for weights, parameter in zip(target, models[0].parameters(), strict=True):
                weights.data.copy_(parameter.data)
        if step >= WARMUP and (step + 1 - WARMUP) % EVERY == 0:
            means = [
                torch.stack([p.data for p in ps]).mean(0) for ps in zip(*(m.parameters() for m in models), strict=True)
            ]
            if outer_optimizer is not None:
                for weights, mean in zip(target, means, strict=True):
                    weights.grad = weights.data - mean
                outer_optimizer.step()
                means = [weights.data.clone() for weights in target]
            for module in models:
                for parameter, mean in zip(module.parameters(), means, strict=True):
                    parameter.data.copy_(mean)
    return models


def trained(strategy: LocalSGD, world: World, steps: Sequence[int]) -> list[Tensor]:
    for number in steps:
        strategy.train_step(Step(strategy, number), [rows(number, world.rank)])  # type: ignore[arg-type]
        strategy.clear_gradient()
    return [parameter.detach().clone() for parameter in strategy.parameters()]


def equal(world: World) -> None:
    """Both train to the weights of a loop by hand; what is shared in between is the mean, and what is local returns."""
    for outer in (None, (0.7, 0.9), (1.0, 0.0)):
        strategy: LocalSGD
        if outer is None:
            strategy = LocalSGD(LocalOptions("local_sgd", EVERY, WARMUP), world, model)
        else:
            strategy = DiLoCo(DiLoCoOptions("diloco", EVERY, WARMUP, *outer), world, model)
        strategy.build_optimizers(lambda module: {"optimizer": optimizer_of(module)})
        found = trained(strategy, world, range(STEPS))
        models = by_hand(world.world_size, outer)
        expected = list(models[world.rank].parameters())
        for tensor, other in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, other.detach(), rtol=1e-12, atol=1e-12)
        with strategy.evaluation() as evaluated:
            for name, tensor in evaluated.named_parameters():
                mean = torch.stack([dict(module.named_parameters())[name].detach() for module in models]).mean(0)
                torch.testing.assert_close(tensor.detach(), mean, rtol=1e-12, atol=1e-12)
        saved = copy.deepcopy(dict(strategy.local_buffers()))
        with strategy.synced_buffers():
            shared = {name: tensor.clone() for name, tensor in strategy.local_buffers().items()}
        for name, tensor in strategy.local_buffers().items():
            assert tensor.equal(saved[name]), name
        flat = torch.cat([tensor.double().reshape(-1) for tensor in shared.values()])
        assert world.broadcast(flat.clone()).equal(flat)
        assert any(not shared[name].equal(saved[name]) for name in shared)  # the last round is not over


def buffers(world: World) -> None:
    """Buffers are averaged at the end of a round, and those without a mean are rank zero's."""

    def with_buffers() -> nn.Module:
        module = model()
        module.register_buffer("mean", torch.zeros(2))
        module.register_buffer("count", torch.zeros((), dtype=torch.int64))
        return module

    strategy = LocalSGD(LocalOptions("local_sgd", EVERY, 0), world, with_buffers)
    strategy.build_optimizers(lambda module: {"optimizer": optimizer_of(module)})
    module = strategy.modules["model"]
    assert isinstance(module.mean, Tensor)
    assert isinstance(module.count, Tensor)
    module.mean.fill_(world.rank)
    module.count.fill_(world.rank + 7)
    with strategy.evaluation():
        assert (module.mean.tolist(), module.count.item()) == ([(world.world_size - 1) / 2] * 2, 7)
    assert (module.mean.tolist(), module.count.item()) == ([world.rank] * 2, world.rank + 7)
    trained(strategy, world, range(EVERY))
    assert (module.mean.tolist(), module.count.item()) == ([(world.world_size - 1) / 2] * 2, 7)


def norms(world: World) -> None:
    """Each rank clips its own gradient; what is recorded is the largest norm, NaN if one is."""
    strategy = LocalSGD(LocalOptions("local_sgd", EVERY, 0), world, model)
    parameters = list(strategy.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float(world.rank + 1))
    count = sum(parameter.numel() for parameter in parameters)
    torch.testing.assert_close(strategy.gradient_norm(parameters).item(), world.world_size * count**0.5)
    before = strategy.clip(parameters, 1.0)
    torch.testing.assert_close(before.item(), (world.rank + 1) * count**0.5)
    torch.testing.assert_close(
        sum(p.grad.square().sum().item() for p in parameters if p.grad is not None), 1.0, rtol=1e-5, atol=0.0
    )
    flag = torch.tensor(float("nan") if world.rank == 0 else 1.0)
    assert strategy.on_any_rank(flag).isnan()
