"""What each rank runs for test_sharded_optimizer.py: a model trained with whole and with divided optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.replica import Replicas
from ddpexp.strategy.sharded_optimizer import ShardedOptimizer
from ddpexp.train.combined_optimizer import ALGORITHM, muon
from ddpexp.train.optimizer_average import OptimizerAverage, average_of
from tests.fitting import STRATEGY, TRAINER

Make = Callable[[Any], Optimizer]
CUT: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw, in a loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),  # its state is there before the first step
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Free(Optimizer):
    """Schedule-free SGD: it has modes, and counts its steps in the settings of its groups.

    Source: Defazio et al., "The Road Less Scheduled", 2024.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "training": False})

    def train(self) -> None:
        self._switch(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _switch(self, training: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["training"] != training else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["k"])))
                z.sub_(parameter.grad, alpha=group["lr"])


WHOLE: dict[str, Make] = {  # they look at a parameter as a whole, or round its last elements in another way
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    "muon and adamw": lambda p: muon(
        [{"params": [q], ALGORITHM: "muon" if q.dim() == 2 else "adamw"} for q in p], lr=0.01
    ),
    "schedule-free": lambda p: Free(p, lr=0.01),
}


class Net(nn.Module):
    """Parameters of many shapes, one of them frozen, one without dimensions, one not contiguous, one 16 bits wide."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(20)
        self.hidden = nn.Linear(20, 33)
        self.transposed = nn.Parameter((torch.randn(33, 7) * 0.1).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        """Shapes: (samples, 9) to (samples, 3)."""
        features = self.norm(self.convolution(rows.view(-1, 1, 3, 3)).flatten(1))
        hidden = torch.tanh(self.hidden(features)) @ self.transposed.t() * self.scale
        result: Tensor = self.head(hidden)
        return result


def build(world: World, sharded: bool, exact: bool = False, through: str = "auto") -> Replicas:
    """Return a strategy with the same weights on every rank and at every number of them."""
    options = replace(STRATEGY, shard_optimizer=sharded, reduce_through=through)  # type: ignore[arg-type]

    def factory() -> nn.Module:
        torch.manual_seed(0)
        return Net()

    if exact:
        return Exact(options, world, factory, gradient_accumulation_steps=12 // world.world_size)
    return DDP(options, world, factory)


def batches(world: World, step: int, exact: bool) -> Iterator[tuple[Tensor, bool]]:
    """Yield the micro-batches of this rank, and whether each is the last: two, or its part of twelve."""
    count = 12 // world.world_size if exact else 2
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * step + world.rank * count + number)
        yield torch.randn(4, 9, generator=generator), number == count - 1


def train(world: World, strategy: Replicas, optimizer: Optimizer, steps: range, exact: bool = False) -> None:
    """Take some steps, with the learning rate changing and the gradient clipped; an average is evaluated after each."""
    average = average_of(None, strategy.modules, {"optimizer": optimizer}, TRAINER)
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for rows, last in batches(world, step, exact):
            with strategy.micro_batch(last):
                (strategy.train_model(rows).square().sum() / 8).backward()
        strategy.clip([p for group in optimizer.param_groups for p in group["params"]], 0.7)
        optimizer.step()
        strategy.clear_gradient()
        if isinstance(average, OptimizerAverage):
            average.update(step)
            average.refresh()
            averages = world.gather_values(average.tensors("model")["hidden.weight"].sum().item())
            assert averages == averages[:1] * world.world_size


def made(strategy: Replicas, make: Make) -> Optimizer:
    """Return the strategy's optimizer."""
    return strategy.build_optimizers(lambda model: {"optimizer": make(strategy.parameters())})["optimizer"]


def check_equal(found: Replicas, expected: Replicas, why: str) -> None:
    """Compare two strategies' weights and buffers, bit by bit."""
    states = found.modules["model"].state_dict(), expected.modules["model"].state_dict()
    for name, tensor in states[1].items():
        assert torch.equal(states[0][name], tensor), f"{why}: {name} differs"


def check_same_state(world: World, found: Optimizer, expected: Optimizer, why: str) -> None:
    """Compare the state of an optimizer that is divided with that of one that is not, and see that it is divided."""
    shards, whole = found.state_dict(), expected.state_dict()
    assert shards["param_groups"] == whole["param_groups"], why
    assert shards["state"].keys() == whole["state"].keys(), why
    elements = 0
    for index, values in whole["state"].items():
        assert shards["state"][index].keys() == values.keys(), why
        for key, value in values.items():
            shard = shards["state"][index][key]
            if isinstance(shard, Shard):
                assert shard.shape == tuple(value.shape), (why, index, key)
                first = shard.first_row or 0
                assert torch.equal(shard.tensor, value[first : first + len(shard.tensor)]), (why, index, key)
                elements += shard.tensor.numel()
            else:
                assert torch.equal(torch.as_tensor(shard), torch.as_tensor(value)), (why, index, key)
    total = sum(v.numel() for s in whole["state"].values() for v in s.values() if isinstance(v, Tensor) and v.dim())
    parts = world.gather_values(elements)
    assert sum(parts) <= total
    if total > 4000:
        assert max(parts) < 1.4 * total / world.world_size, (why, parts, total)


def equal(world: World) -> None:
    """The weights and the state are those of whole optimizers, for every optimizer, through memory and gloo."""
    for exact in (False, True):
        for name, make in {**CUT, **WHOLE}.items():
            for through in ("shared_memory", "backend") if name == "adamw" else ("auto",):
                why = f"{name}, {through}, {'exact' if exact else 'fast'}"
                both = [build(world, sharded, exact, through) for sharded in (False, True)]
                optimizers = [made(strategy, make) for strategy in both]
                for strategy, optimizer in zip(both, optimizers, strict=True):
                    train(world, strategy, optimizer, range(5), exact)
                assert isinstance(optimizers[1], ShardedOptimizer)
                check_equal(both[1], both[0], why)
                check_same_state(world, optimizers[1], optimizers[0], why)


def resumed(world: World) -> None:
    """State of whole optimizers is loaded into divided ones, which then take the same steps."""
    for name, make in {**CUT, **WHOLE}.items():
        before, after = build(world, False), build(world, True)
        whole = made(before, make)
        train(world, before, whole, range(3))
        divided = made(after, make)
        divided.load_state_dict(deepcopy(whole.state_dict()))
        after.modules["model"].load_state_dict(before.modules["model"].state_dict())
        for strategy, optimizer in ((before, whole), (after, divided)):
            train(world, strategy, optimizer, range(3, 6))
        check_equal(after, before, name)
        check_same_state(world, divided, whole, name)


def sparse(world: World) -> None:
    """A sparse gradient is refused."""
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = ShardedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), world)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
