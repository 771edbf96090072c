"""What each rank runs for test_strategy.py: models trained whole and sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.param_dtype import lower
from ddpexp.strategy.replica import Replicas
from ddpexp.train.precision import Precision
from tests.fitting import STRATEGY
from tests.refusals import refused
from tests.strategy.sharded import CUT, Free, Make

OPTIONS = FSDPOptions(
    kind="fsdp", blocks=None, min_block_mb=0.001, reshard_after_forward=True, broadcast_buffers=True,
    reduce_through="auto", whole=(), dp_replicate_size=1,
    gather_in_evaluation=True, init="whole",
)  # fmt: skip


class Block(nn.Module):
    """A residual block with more rows than ranks, and fewer in its bias."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, rows), nn.Linear(rows, width)
        self.norm = nn.BatchNorm1d(width)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        """Shapes: (samples, width), both."""
        result: Tensor = rows + self.norm(self.down(torch.tanh(self.up(rows)))) + self.shift
        return result


class Net(nn.Module):
    """Blocks with tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 7)
        self.blocks = nn.ModuleList([Block(7, 13), Block(7, 3)])
        self.last = nn.Linear(7, 9, bias=False)
        self.head = nn.Linear(9, 7)
        self.head.weight = self.first.weight
        self.head.bias.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        """Shapes: (samples, 9) to (samples, 7)."""
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        result: Tensor = self.head(self.last(rows))
        return result


def seeded(factory: Callable[[], Any]) -> Callable[[], Any]:
    """Return a factory that builds the same on every rank."""

    def build() -> Any:
        torch.manual_seed(0)
        return factory()

    return build


def train(world: World, strategy: Replicas, make: Make, limit: float | None = None, bad_step: int = -1) -> list[float]:
    """Train for six steps of two micro-batches; return the norms. Not finite is one sample of `bad_step`, of a rank."""
    optimizer = strategy.build_optimizers(lambda model: {"optimizer": make(strategy.parameters())})["optimizer"]
    precision = Precision("fp32", world.device, bad_step >= 0, strategy.gradient_weight, strategy)
    norms = []
    for step in range(6):
        for number in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 2 * world.rank + number)
            rows = torch.randn(5, 9, generator=generator)
            if step == bad_step and world.rank == 1:
                rows[0, 0] = torch.inf
            with strategy.micro_batch(last=number == 1):
                loss = strategy.train_model(rows).square().sum()
                precision.backward(loss, torch.tensor(strategy.gradient_weight / (10 * world.world_size)))
        precision.unscale(optimizer)
        parameters = list(strategy.parameters())
        norms.append(float(strategy.gradient_norm(parameters) if limit is None else strategy.clip(parameters, limit)))
        precision.step(optimizer)
        precision.update()
        strategy.clear_gradient()
    return norms


def whole(value: Tensor) -> Tensor:
    """Return all rows of a tensor. Ranks: all."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_equal(found: Replicas, expected: Replicas, why: str) -> None:
    """Compare two strategies' weights and buffers, bit by bit."""
    state = found.modules["model"].state_dict()
    for name, tensor in expected.modules["model"].state_dict().items():
        assert torch.equal(whole(state[name]), tensor), f"{why}: {name} differs"


def clipped_and_skipped(world: World) -> None:
    """Clipping goes by the norm of all rows, and all ranks skip a step in which one rank's gradient is not finite."""
    for limit, bad_step in ((0.05, -1), (None, 3)):
        expected = DDP(STRATEGY, world, seeded(Net))
        found = FSDP(OPTIONS, world, seeded(Net))
        for strategy in (expected, found):
            train(world, strategy, CUT["adamw"], limit, bad_step)
        check_equal(found, expected, f"limit {limit}, bad step {bad_step}")


def schedule_free(parameters: Any) -> Optimizer:
    """Return an optimizer with modes, which trains."""
    optimizer = Free(parameters, lr=0.01)
    optimizer.train()
    return optimizer


def every_optimizer(world: World) -> None:
    """Optimizers that take each element by itself give the weights of replicas; Rprop sets elements of gradients."""
    for name, make in {**CUT, "schedule-free": schedule_free}.items():
        found = FSDP(OPTIONS, world, seeded(Net))
        if name == "rprop":
            with pytest.raises(RuntimeError, match="DTensor"):
                train(world, found, make)
            continue
        expected = DDP(STRATEGY, world, seeded(Net))
        norms = [train(world, strategy, make) for strategy in (expected, found)]
        assert norms[0] == norms[1], name
        check_equal(found, expected, name)


def reduced_each_micro_batch(world: World) -> None:
    """Gradients that are reduced after each micro-batch are nearly those that are reduced once."""
    one_reduction, each = (
        FSDP(replace(OPTIONS, reduce_each_micro_batch=value), world, seeded(Net)) for value in (False, True)
    )
    norms = [train(world, strategy, CUT["nesterov"]) for strategy in (one_reduction, each)]
    assert all(abs(one - other) < 1e-4 * one for one, other in zip(*norms, strict=True)), norms


def in_bf16(world: World) -> None:
    """Sharded models compute in bf16 what replicas do, with and without weights in fp32."""
    for master in (True, False):

        def factory(copies: bool, master: bool = master) -> Any:
            torch.manual_seed(0)
            return lower(Net(), copies, stays_fp32=master)

        expected = DDP(STRATEGY, world, lambda: factory(copies=True))
        found = FSDP(OPTIONS, world, lambda: factory(copies=False), gathers_bf16=master)
        norms = [train(world, strategy, CUT["nesterov"], 0.1) for strategy in (expected, found)]
        assert all(abs(one - other) < 0.05 * one for one, other in zip(*norms, strict=True)), (master, norms)
        assert {p.dtype for p in found.parameters()} == {torch.float32 if master else torch.bfloat16}


def norms_of_parts(world: World, replicas: int = 1) -> None:
    """On GPUs the norm is that of the parts that ranks have: on all ranks the norm of whole gradients, but for bits."""
    found = FSDP(replace(OPTIONS, dp_replicate_size=replicas), world, seeded(Net))
    with found.micro_batch(last=True):
        found.train_model(torch.linspace(-1, 1, 45).view(5, 9)).square().sum().backward()
    parameters = list(found.parameters())
    torch.testing.assert_close(found._norm_of_parts(parameters, torch.float32), found.gradient_norm(parameters))


def two_workers(world: World) -> None:
    """Everything that two workers show."""
    clipped_and_skipped(world)
    norms_of_parts(world)
    every_optimizer(world)
    reduced_each_micro_batch(world)
    in_bf16(world)


def rows_of_replicas(world: World) -> None:
    """With hybrid sharding each rank knows which rows it holds, and of which replica."""
    norms_of_parts(world, replicas=2)
    found = FSDP(replace(OPTIONS, dp_replicate_size=2), world, seeded(Net))
    for name, tensor in found.modules["model"].state_dict().items():
        shard = found.shard(name, tensor)
        assert (shard.first_row is None) == (not isinstance(tensor, DTensor))
        assert shard.replica == (world.rank // 2 if isinstance(tensor, DTensor) else 0)


def evaluated(world: World) -> None:
    """Inside `evaluation` a forward pass does not communicate, and gives what the whole model gives."""
    expected, found = DDP(STRATEGY, world, seeded(Net)), FSDP(OPTIONS, world, seeded(Net))
    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(world.rank))
    with torch.no_grad(), expected.evaluation() as one, found.evaluation() as other:
        for _ in range(world.rank):  # another number of passes on every rank
            assert torch.equal(one(rows), other(rows))
    train(world, found, CUT["sgd"])
    train(world, expected, CUT["sgd"])
    check_equal(found, expected, "after an evaluation")


def teacher(world: World) -> None:
    """A frozen model is sharded, or held whole by choice; a trained one cannot be."""

    def pair() -> dict[str, nn.Module]:
        return {"student": Net(), "teacher": Net().requires_grad_(False)}

    expected = seeded(pair)()["teacher"].state_dict()
    for options in (
        OPTIONS, replace(OPTIONS, whole=("teacher",)), replace(OPTIONS, whole=("teacher",), init="replay"),
    ):  # fmt: skip
        found = FSDP(options, world, seeded(pair))
        if options.whole:
            assert all(torch.equal(t, expected[n]) for n, t in found.modules["teacher"].state_dict().items())
        kinds = {name: isinstance(next(module.parameters()), DTensor) for name, module in found.modules.items()}
        assert kinds == {"student": True, "teacher": not options.whole}
        with found.micro_batch(last=True):
            rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(world.rank))
            (found.train_model["student"](rows) - found.train_model["teacher"](rows)).square().sum().backward()
    for name in ("student", "tutor"):
        with refused(f"strategy.whole=[{name}]"):
            FSDP(replace(OPTIONS, whole=(name,)), world, seeded(pair))


def cannot(world: World) -> None:
    """What cannot be cut or is not used is refused by name."""

    class Scalar(nn.Linear):
        def __init__(self) -> None:
            super().__init__(9, 7)
            self.scale = nn.Parameter(torch.tensor(1.0))

    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(9, 7)
            self.extra = nn.Linear(9, 9)

    with refused("model.scale is a single number"):
        FSDP(OPTIONS, world, Scalar)
    columns = nn.Linear(9, 7)
    columns.weight = nn.Parameter(torch.randn(9, 7).t())
    with refused("model.weight is not contiguous"):
        FSDP(OPTIONS, world, lambda: columns)
    with refused("strategy.blocks=[Blok]"):
        FSDP(replace(OPTIONS, blocks=("Blok",)), world, Net)
    with refused("got no gradient", DdpexpError):
        train(world, FSDP(OPTIONS, world, seeded(Unused)), CUT["sgd"])
