"""What each rank runs for test_frozen.py: parameter groups, frozen parameters and late starts in every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.compat import lazy_dynamo
from ddpexp.config.parse import parse
from ddpexp.data.batch_plan import plan_batches
from ddpexp.distributed.world import World
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.settings.parameters import FreezeUntil, ParamGroup
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.replica import Replicas
from ddpexp.train.build_optimizers import build_optimizers
from ddpexp.train.freezing import freeze
from ddpexp.train.optimizer_step import Step
from ddpexp.train.optimizers import optimizer_state, parameter_names, restore_optimizers, settings
from ddpexp.train.precision import Precision
from ddpexp.train.process import run_rank
from ddpexp.train.run import TrainingRun
from ddpexp.train.schedule import Cosine
from tests.fitting import ALONE, STRATEGY, TRAINER
from tests.strategy.fsdp.ranks import OPTIONS, whole

STEPS, STARTS_AT = 6, 3
SETTINGS = replace(
    TRAINER, clip_grad_norm=0.7, freeze=("first.*", "blocks.0.weight"), precision="fp32",
    param_groups=(ParamGroup(match="*.bias", settings={"weight_decay": 0}), ParamGroup(match="last.*", lr_scale=10)),
    freeze_until=FreezeUntil(STARTS_AT, ("blocks.*",)),
)  # fmt: skip


class Net(nn.Module):
    """A frozen layer, two that are trained later (one in part), a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)

    def forward(self, rows: Tensor) -> Tensor:
        """Shapes: (samples, 9) to (samples, 3)."""
        rows = self.first(rows)
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        result: Tensor = self.last(self.norm(rows))
        return result


@dataclass(frozen=True)
class Squares:
    """The squares of what the model returns."""

    def step(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
        """Shapes: (samples, 9)."""
        return model(batch).square().sum(), len(batch), {}


def main(case: str, size: str) -> int:
    """Run one of the functions below on every rank."""

    def work(control: Control) -> None:
        lazy_dynamo.defer()
        torch.set_num_threads(1)
        world = World.join(Layout(1, int(size), "cpu", "gloo", 1))
        globals()[case](world)
        world.barrier()

    return run_rank(work)


def factory() -> nn.Module:
    """Build the model with the same weights everywhere, frozen before any strategy sees it."""
    torch.manual_seed(0)
    model = Net()
    freeze(model, SETTINGS)
    return model


STRATEGIES: dict[str, Callable[[World], Replicas]] = {
    "ddp": lambda world: DDP(STRATEGY, world, factory),
    "ddp of torch": lambda world: DDP(replace(STRATEGY, gradient_as_bucket_view=False), world, factory),
    "shard_optimizer": lambda world: DDP(replace(STRATEGY, shard_optimizer=True), world, factory),
    "fsdp": lambda world: FSDP(OPTIONS, world, factory),
    "fsdp, replayed": lambda world: FSDP(replace(OPTIONS, init="replay"), world, factory),
    "exact": lambda world: Exact(STRATEGY, world, factory, gradient_accumulation_steps=4 // world.world_size),
    "exact, shard_optimizer": lambda world: Exact(
        replace(STRATEGY, shard_optimizer=True), world, factory, gradient_accumulation_steps=4 // world.world_size
    ),
}


class Trained:
    """A strategy with its optimizers, which takes steps as a run does."""

    def __init__(self, world: World, kind: str) -> None:
        """Build everything as `ddpexp.train.build` does."""
        self.world, self.strategy = world, STRATEGIES[kind](world)
        strategy = self.strategy
        trainer = replace(SETTINGS, reduction="exact" if kind.startswith("exact") else "fast")
        experiment = replace(EXPERIMENT, trainer=trainer)
        self.optimizers = strategy.build_optimizers(
            lambda model: build_optimizers(
                experiment, Squares(), strategy.modules, strategy.single, strategy.parameters
            )
        )
        self.built = {name: settings(one) for name, one in self.optimizers.items()}
        self.plan = plan_batches(20, 5, world.world_size)
        data: Any = SimpleNamespace(plan=self.plan, steps_per_epoch=STEPS)
        self.step = Step(TrainingRun(
            task=Squares(), strategy=strategy, optimizers=self.optimizers, schedule=Cosine(), world=world,
            precision=Precision("fp32", world.device, False, strategy.gradient_weight, strategy),
            control=Control(None), train=data, options=trainer, num_steps=STEPS,
        ))  # fmt: skip

    def train(self, steps: range) -> list[float]:
        """Take steps; return the gradient norms."""
        norms = []
        for number in steps:
            first = self.world.rank * self.plan.gradient_accumulation_steps
            batches = []
            for position in range(first, first + self.plan.gradient_accumulation_steps):
                generator = torch.Generator().manual_seed(10 * number + position)
                batches.append(torch.randn(5, 9, generator=generator))
            self.step.take(number, batches, with_norm=False)
            norms.append(float(self.step.norms[""]))
        return norms

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers, whole."""
        return {name: whole(value).clone() for name, value in self.strategy.modules["model"].state_dict().items()}

    def states(self) -> set[str]:
        """Return the names of the parameters that an optimizer keeps state for. Ranks: all."""
        names = parameter_names(self.strategy.modules)
        return set(optimizer_state(self.optimizers["optimizer"], names)["state"])


def _experiment() -> Any:
    from ddpexp.config.compose import compose_command

    composed: Any = compose_command(["recipe=mnist", "optimizer=adamw", "optimizer.lr=0.01"])
    return parse(composed.values)


EXPERIMENT = _experiment()


def equal(world: World) -> None:
    """Every strategy has the same bits, and frozen parameters those that they began with."""
    start = factory().state_dict()
    results: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    for kind in STRATEGIES:
        trained = Trained(world, kind)
        norms = trained.train(range(STARTS_AT))
        weights = trained.weights()
        moved = {name for name in start if "num_batches" not in name and not torch.equal(start[name], weights[name])}
        assert moved == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "last.weight",
            "last.bias"}, (kind, moved)  # fmt: skip
        assert trained.states() == {"model.norm.weight", "model.norm.bias", "model.last.weight", "model.last.bias"}
        norms += trained.train(range(STARTS_AT, STEPS))
        weights = trained.weights()
        still = {name for name in start if torch.equal(start[name], weights[name])}
        assert still == {"first.weight", "first.bias", "blocks.0.weight"}, (kind, still)
        results[kind] = (norms, weights)
    alone = Trained(ALONE, "exact")
    results["exact, alone"] = (alone.train(range(STEPS)), alone.weights())
    for kind, (norms, weights) in results.items():
        expected = results["exact" if kind.startswith("exact") else "ddp"]
        assert norms == expected[0], (kind, norms, expected[0])
        for name, value in weights.items():
            assert torch.equal(value, expected[1][name]), (kind, name)


def resumed(world: World) -> None:
    """A run that stops before or after the late start ends with the weights of one that does not stop."""
    for kind in ("ddp", "shard_optimizer", "exact"):
        undisturbed = Trained(world, kind)
        undisturbed.train(range(STEPS))
        for stop in (STARTS_AT - 1, STARTS_AT, STARTS_AT + 1):
            before, after = Trained(world, kind), Trained(world, kind)
            before.train(range(stop))
            names = parameter_names(before.strategy.modules)
            saved = {
                name: {**optimizer_state(one, names), "built": before.built[name]}
                for name, one in before.optimizers.items()
            }
            if kind == "shard_optimizer":  # a checkpoint has whole tensors
                whole_run = Trained(world, "ddp")
                whole_run.train(range(stop))
                names = parameter_names(whole_run.strategy.modules)
                saved = {
                    "optimizer": {
                        **optimizer_state(whole_run.optimizers["optimizer"], names),
                        "built": whole_run.built["optimizer"],
                    }
                }
            after.strategy.modules["model"].load_state_dict(before.weights())
            names = parameter_names(after.strategy.modules)
            assert restore_optimizers(after.optimizers, saved, names, after.strategy) == []
            after.train(range(stop, STEPS))
            for name, value in after.weights().items():
                assert torch.equal(value, undisturbed.weights()[name]), (kind, stop, name)
