"""Sharded models in one process group, one way after the other: steps, checkpoints, and what a rank holds.

Run by torchrun; prints JSON on rank zero: of each way its figures, by round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from benchmarks.peers.checkpoints import SIZES
from benchmarks.peers.gpt import GPT, Layer, Size
from ddpexp.checkpoint.format import complete_checkpoints, open_checkpoint
from ddpexp.checkpoint.writer import Writer
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.config.strategies import builder_of
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Arrays
from ddpexp.distributed.world import World
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.run.directory import RunDir
from ddpexp.strategy.base import Strategy
from ddpexp.train.checkpointer import Checkpointer
from ddpexp.train.loop import Loop
from ddpexp.train.precision import Precision
from ddpexp.train.run import TrainingRun
from ddpexp.train.schedule import Cosine

MODELS = {"10M": Size(6, 6, 372, 64, 96), "tiny": Size(2, 2, 32, 16, 64)}
BATCH = 4
COMPILED = ["trainer.compile=true", "trainer.compile_blocks=Layer"]
WAYS = {
    "ddp": ["strategy=ddp"],
    "shard_optimizer": ["strategy=ddp", "strategy.shard_optimizer=true"],
    "fsdp": ["strategy=fsdp", "strategy.blocks=[Layer]"],
    "fsdp over gloo": ["strategy=fsdp", "strategy.blocks=[Layer]", "strategy.reduce_through=backend"],
    "ddp again": ["strategy=ddp"],
    "ddp, compiled": ["strategy=ddp", *COMPILED],
    "fsdp, compiled": ["strategy=fsdp", "strategy.blocks=[Layer]", *COMPILED],
    "fsdp, compiled, again": ["strategy=fsdp", "strategy.blocks=[Layer]", *COMPILED],
}
Figures = dict[str, list[dict[str, float]]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("steps", "checkpoints"))
    parser.add_argument("--size", default="10M", help="of steps")
    parser.add_argument("--millions", type=int, default=100, help="of parameters, of checkpoints")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, rank, 0, size, size, torch.device("cpu"))
    if words.what == "steps":
        figures = steps(world, MODELS[words.size], words.rounds)
    else:
        figures = checkpoints(world, SIZES[words.millions], words.rounds, words.folder)
    if world.is_rank_zero:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)


def strategy_of(overrides: list[str], world: World, factory: Callable[[], nn.Module], loads: bool = False) -> Strategy:
    """Build a strategy as a run does; one that `loads` a checkpoint has no values to begin with."""
    composed = compose(["recipe=mnist", "trainer.channels_last=false", "trainer.device=cpu", *overrides])
    experiment = parse(composed.values)
    options = experiment.strategy.to_be_loaded() if loads else experiment.strategy
    return builder_of(options)(
        options, world, factory, trainer=experiment.trainer, gradient_accumulation_steps=1, prepare=lambda models: None
    )


def held(tensors: Iterator[Any]) -> int:
    """Return the bytes of tensors that this rank holds."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each token from those before."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def steps(world: World, size: Size, rounds: int) -> Figures:
    """Take a step in each way, in a random order; the first one of each is not counted. Ranks: all."""

    def factory() -> nn.Module:
        torch.manual_seed(0)
        return GPT(size)

    takes = {name: our_step(strategy_of(overrides, world, factory)) for name, overrides in WAYS.items()}
    takes["fully_shard"] = their_step(factory())
    takes["fully_shard again"] = their_step(factory())
    generator = torch.Generator().manual_seed(world.rank)
    batches = [torch.randint(size.words, (BATCH, size.context + 1), generator=generator) for _ in range(rounds + 1)]
    figures: Figures = {name: [] for name in takes}
    for number, tokens in enumerate(batches):
        for name in random.Random(number).sample(list(takes), len(takes)):
            dist.barrier()
            begin = time.perf_counter()
            loss, num_bytes = takes[name](tokens)
            seconds = time.perf_counter() - begin
            if number:
                worst = world.sum(torch.tensor([seconds, loss], dtype=torch.float64)) / world.world_size
                figures[name].append({"ms": 1e3 * float(worst[0]), "loss": float(worst[1]), "held": float(num_bytes)})
    return figures


def our_step(strategy: Strategy) -> Callable[[Tensor], tuple[float, int]]:
    """Return a step with a strategy, which returns the loss and the bytes of weights, gradients and optimizer."""
    make = lambda _: {"optimizer": torch.optim.AdamW(strategy.parameters(), lr=3e-4)}  # noqa: E731
    optimizer = strategy.build_optimizers(make)["optimizer"]
    share = strategy.gradient_weight / dist.get_world_size()

    def take(tokens: Tensor) -> tuple[float, int]:
        with strategy.micro_batch(last=True):
            loss = loss_of(strategy.train_model, tokens)
            (loss * share).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        num_bytes = held(
            value for p in strategy.parameters() for value in (p, p.grad, *optimizer.state.get(p, {}).values())
        )
        strategy.clear_gradient()
        return float(loss.detach()), num_bytes

    return take


def their_step(model: nn.Module) -> Callable[[Tensor], tuple[float, int]]:
    """Return a step of the loop in torch's tutorial of FSDP2."""
    for layer in model.modules():
        if isinstance(layer, Layer):
            fully_shard(layer, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def take(tokens: Tensor) -> tuple[float, int]:
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), 0

    return take


class Nothing:
    """A task without steps."""

    def step(self, model: Any, batch: Any) -> Any:
        """Do nothing."""


class Saved:
    """A model of linear layers with SGD's momentum, and what saves and restores it."""

    def __init__(self, overrides: list[str], world: World, sizes: tuple[int, ...], folder: Path, loads: bool) -> None:
        """Build it; what is not to be loaded takes one step, so that there is a momentum."""

        def factory() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())))

        self.world, self.strategy = world, strategy_of(overrides, world, factory, loads)
        self.trainer = parse(compose(["recipe=mnist"]).values).trainer
        make = lambda _: {"optimizer": torch.optim.SGD(self.strategy.parameters(), lr=1e-4, momentum=0.9)}  # noqa: E731
        self.optimizers = self.strategy.build_optimizers(make)
        writer = Writer(folder, world, keep_last=1)
        self.checkpointer = Checkpointer(RunDir(folder), writer, self.strategy, Logger(), world, {}, {}, b"")
        batches = TrainBatches(Arrays((torch.zeros(8, 1),)), plan_batches(8, 1, 1), 0, 0, world.device)
        run = TrainingRun(
            task=Nothing(), strategy=self.strategy, optimizers=self.optimizers, schedule=Cosine(), world=world,
            precision=Precision("fp32", world.device, False), train=batches, control=Control(None),
            options=self.trainer, num_steps=8,
        )  # fmt: skip
        self.loop = Loop(run, {}, Logger(), self.checkpointer)
        if not loads:
            with self.strategy.micro_batch(last=True):
                self.strategy.train_model(torch.randn(8, sizes[0])).square().mean().backward()
            self.optimizers["optimizer"].step()
            self.strategy.clear_gradient()

    def save(self, step: int) -> None:
        """Save as the loop does."""
        self.loop.progress.step = step
        self.checkpointer.save(self.loop.states, self.loop.progress, 0.0, end=False)

    def restore(self, folder: Path, checks: bool) -> None:
        """Restore the newest checkpoint as a start does, with the hashes of its files or without."""
        checkpoint = open_checkpoint(complete_checkpoints(folder)[0])
        if checks and (problem := checkpoint.problem(self.world.rank, self.world.world_size)) is not None:
            raise RuntimeError(problem)
        self.checkpointer.restore(checkpoint, self.loop.states)


def checkpoints(world: World, sizes: tuple[int, ...], rounds: int, folder: Path) -> Figures:
    """Save in each way, in turn, then load; the first round is not counted. Ranks: all."""
    ways = {"ddp": WAYS["ddp"], "fsdp": ["strategy=fsdp"]}
    saved = {name: Saved(overrides, world, sizes, folder / name, False) for name, overrides in ways.items()}
    saved["ddp again"] = saved["ddp"]
    figures: Figures = {name: [] for name in saved}
    for number in range(rounds + 1):
        for place, (name, one) in enumerate(saved.items(), 1):
            with timed(world) as stall:
                one.save(len(saved) * number + place)
            one.checkpointer.finish()
            if number:
                figures[name].append({"stall": stall[0]})
    saved.clear()
    gc.collect()
    loads: dict[str, Callable[[], tuple[list[float], int]]] = {
        "load": lambda: load(world, sizes, folder / "fsdp", False),
        "load and check": lambda: load(world, sizes, folder / "fsdp", True),
        "read": lambda: load(world, sizes, folder / "fsdp", None),
        "read again": lambda: load(world, sizes, folder / "fsdp", None),
    }
    figures |= {name: [] for name in loads}
    for number in range(rounds):
        for name in [*list(loads)[number % len(loads) :], *list(loads)[: number % len(loads)]]:
            found: dict[str, float] = {}
            for cache in ("cold", "warm"):
                if cache == "cold" and world.is_rank_zero:
                    forget(folder / "fsdp")
                [found[cache]], extra = loads[name]()
                found["extra"] = max(found.get("extra", 0.0), float(extra))
            figures[name].append(found)
    return figures


def load(world: World, sizes: tuple[int, ...], folder: Path, checks: bool | None) -> tuple[list[float], int]:
    """Load into a new sharded model; return the seconds of the slowest rank, and its peak of memory beyond its share.

    Hashes are checked or not; without either, as many bytes are only read beside the model. Units: bytes. Ranks: all.
    """
    one = Saved(["strategy=fsdp"], world, sizes, folder / "none", True)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is freed is not to be used for what is read
    before = memory("VmRSS", forget_peak=True)
    with timed(world) as seconds:
        if checks is None:
            read_share(world, folder)
        else:
            one.restore(folder, checks)
    states = one.optimizers["optimizer"].state.values()
    share = held(value for state in states for value in state.values())
    extra = torch.tensor(float(memory("VmHWM") - before - share))
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    return seconds, int(extra)


def read_share(world: World, folder: Path) -> None:
    """Read an equal share of the bytes of the weights and the momentum into new memory."""
    for path in sorted(complete_checkpoints(folder)[0].glob("*.safetensors")):
        size = path.stat().st_size
        begin, end = world.rank * size // world.world_size, (world.rank + 1) * size // world.world_size
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        array: Any = buffer.numpy()
        rest = memoryview(array)
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while rest and (num_bytes := file.readinto(rest)):
                rest = rest[num_bytes:]


@contextmanager
def timed(world: World) -> Iterator[list[float]]:
    """Time a block that all ranks begin together: the list gets the seconds of the slowest one. Ranks: all."""
    found: list[float] = []
    dist.barrier()
    begin = time.perf_counter()
    yield found
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    found.append(float(seconds))


def forget(folder: Path) -> None:
    """Remove the files of the newest checkpoint from the page cache, from which they would be read else."""
    for path in complete_checkpoints(folder)[0].iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def memory(kind: str, forget_peak: bool = False) -> int:
    """Return what this process has (VmRSS), or had at most (VmHWM). Units: bytes. Source: proc(5)."""
    if forget_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


if __name__ == "__main__":
    main()
