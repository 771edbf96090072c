"""Optimizers as users write them, for test_optimizer_trial.py, and what its ranks do with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.train.optimizer_trial import check_divisible, other_rounding
from tests.strategy.fsdp.ranks import schedule_free
from tests.strategy.sharded import CUT, WHOLE


class Signs(Optimizer):
    """Lion without momentum: every element by itself."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = [0]  # deepcopy of an optimizer would leave this out

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls[0] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter -= group["lr"] * torch.sign(gradient)


class Modes(Signs):
    """It refuses to step before `train` is called."""

    training = False

    def train(self) -> None:
        self.training = True

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not self.training:
            raise RuntimeError("call train first")
        super().move(parameter, gradient, group)


class OwnRate(Signs):
    """A rate that grows with the gradients of all parameters, and is as small as it was built for many steps."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0.0) + float(gradient.abs().sum())
        super().move(parameter, gradient, group)


class LargestFirst(Signs):
    """Each element by the largest of all parameters' gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.largest = max(gradient.abs().max() for gradient in gradients)
        super().step()

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter -= group["lr"] * gradient / self.largest


class Noise(Signs):
    """Random steps."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter -= group["lr"] * torch.randn(parameter.shape)


class Lists(Signs):
    """A state of lists, as SOAP has."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["bases"] = [torch.eye(2)]
        super().move(parameter, gradient, group)


class Wide(Signs):
    """It needs more columns than a trial's parameters have."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient.view(-1)[1000]


class LocalNorm(Signs):
    """A norm of the rows that a rank has."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        parameter -= group["lr"] * gradient / own.norm()


class Copies(Signs):
    """A copy of several tensors at once, for which torch has no rule with DTensors."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        before = [torch.zeros_like(gradient)]
        torch._foreach_copy_(before, [gradient])
        super().move(parameter, before[0], group)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def refusal(kind: Callable[..., Optimizer], module: nn.Module) -> str:
    """Return the text of the refusal, or an empty one; the optimizer and its parameters are as before."""
    parameters = list(module.parameters())
    optimizer: Any = kind([{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}])
    before = copy.deepcopy(parameters)
    drawn = torch.random.get_rng_state()
    text = ""
    try:
        check_divisible(optimizer, f"optimizer._target_=mine.{kind.__name__}", "strategy=fsdp")
    except RefusedError as error:
        text = str(error)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert optimizer.calls == [0]
    assert not optimizer.state
    assert not hasattr(optimizer, "largest")
    assert [set(group) for group in optimizer.param_groups] == [{"params", "lr"}] * 2
    for parameter, old in zip(parameters, before, strict=True):
        own, expected = ((t.to_local() if hasattr(t, "to_local") else t).detach() for t in (parameter, old))
        assert torch.equal(own, expected)
        assert parameter.grad is None
    return text


def dtensors(world: World) -> None:
    """Try optimizers with parameters of which each rank has some rows. Ranks: all."""
    for kind, expected in (
        (Signs, ""),
        (Modes, ""),
        (Copies, "optimizer._target_=mine.Copies fails in torch with strategy=fsdp, where it gets DTensors (NotImpl"),
        (LocalNorm, "optimizer._target_=mine.LocalNorm trains to other weights with strategy=fsdp, which gives each "),
    ):
        module = net()
        fully_shard(module)
        found = refusal(kind, module)
        assert found.startswith(expected), found
        assert bool(found) == bool(expected), found
    module = net()
    fully_shard(module)
    for make, alike in (
        (Signs, True), (Modes, True), (schedule_free, True), (LocalNorm, False), (Wide, False),
        (CUT["adamw"], True), (WHOLE["adamw, fused"], False), (WHOLE["muon"], False),
    ):  # fmt: skip
        parameters = list(module.parameters())
        said = other_rounding(make(parameters))
        assert said.endswith("will differ from those of strategy=ddp") != alike, (make, said)
        assert other_rounding(make(list(net().parameters()))) == "", make  # no rank has some rows
        assert all(parameter.grad is None for parameter in parameters)
