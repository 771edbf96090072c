"""What each rank runs for test_compiled_blocks.py: a model whose blocks are compiled, whole and divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ddpexp.distributed.world import World
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.fsdp.exact import ExactFSDP
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.param_dtype import lower
from ddpexp.strategy.replica import Replicas
from ddpexp.strategy.tensor.strategy import TensorParallel
from ddpexp.train.activation_checkpointing import checkpoint_activations
from ddpexp.train.compilations import Compilations
from recipes.gpt import GPT
from tests.fitting import STRATEGY
from tests.strategy.fsdp.ranks import OPTIONS, seeded

BLOCKS = Compilation("default", "Block")
TOKENS, WORDS = 16, 64
Make = Callable[[Callable[[], Any]], Replicas]


def build(**options: Any) -> GPT:
    return GPT(WORDS, TOKENS, num_layers=4, num_heads=4, width=32, **options)


def train(world: World, make: Make, factory: Callable[[], Any], steps: int = 4) -> tuple[dict[str, Tensor], list[str]]:
    """Train with two micro-batches a step; return the weights and what was compiled. Ranks: all."""
    torch._dynamo.reset()
    compilations = Compilations.watched()
    strategy = make(seeded(factory))
    optimizer = strategy.build_optimizers(lambda _: {"one": torch.optim.AdamW(strategy.parameters(), 0.01)})["one"]
    for number in range(2 * steps):
        torch.manual_seed(world.world_size * number + strategy.data.rank)
        rows = torch.randint(0, WORDS, (4, TOKENS + 1))
        with strategy.micro_batch(last=number % 2 == 1):
            scores = strategy.train_model(rows[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(scores, rows[:, 1:].flatten()) / (2 * strategy.data.size)
            (loss * strategy.gradient_weight).backward()  # type: ignore[no-untyped-call]
        if number % 2:
            optimizer.step()
            strategy.clear_gradient()
    weights = strategy.modules["model"].state_dict()
    return {name: whole(value) for name, value in weights.items()}, list(compilations._ids)


def whole(value: Tensor) -> Tensor:
    """Return all rows of a tensor. Ranks: all."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(world: World, ways: Mapping[str, Make], factory: Callable[[], Any]) -> None:
    """Check that each way compiles one block, and ends with the weights of the first one."""
    expected: dict[str, Tensor] = {}
    for name, make in ways.items():
        weights, ids = train(world, make, factory)
        assert len(ids) == 1, f"{name}: {ids}"
        expected = expected or weights
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in weights), name


def sharded(world: World, prepare: Any = lambda models: None, **options: Any) -> Make:
    return lambda factory: FSDP(replace(OPTIONS, **options), world, factory, compilation=BLOCKS, prepare=prepare)


def same_bits(world: World) -> None:
    """Sharded models have the weights of replicas, and activations that are computed again those of the kept ones."""
    again = partial(checkpoint_activations, classes=["Block"])
    ddp = lambda factory: DDP(STRATEGY, world, factory, compilation=BLOCKS)  # noqa: E731
    ways: dict[str, Make] = {
        "ddp": ddp,
        "fsdp": sharded(world),
        "gloo": sharded(world, reduce_through="backend"),
        "kept whole": sharded(world, reshard_after_forward=False),
        "replay": sharded(world, init="replay"),
        "again": sharded(world, again),
        "ddp, again": lambda factory: DDP(STRATEGY, world, factory, compilation=BLOCKS, prepare=again),
        "replay, again": sharded(world, again, init="replay"),
    }
    check(world, ways, partial(build, dropout=0.2))
    exact: Sequence[Any] = (Exact, STRATEGY), (ExactFSDP, OPTIONS)
    check(
        world,
        {
            kind.__name__: partial(kind, options, world, compilation=BLOCKS, gradient_accumulation_steps=2)
            for kind, options in exact
        },
        build,
    )


def divided_layers(world: World) -> None:
    """Blocks whose layers are divided are compiled once, with their collectives; they compute nearly the same."""
    again = partial(checkpoint_activations, classes=["Block"])
    for by_tokens in (False, True):
        options = replace(OPTIONS, tp_size=2, sequence_parallel=by_tokens)
        plain = partial(TensorParallel, options, world)
        factory = lambda: build(bias=True, tied=False, positions="rotary", num_kv_heads=2).double()  # noqa: E731
        ways = {"compiled": partial(plain, compilation=BLOCKS)}
        ways["again"] = partial(ways["compiled"], prepare=again)
        check(world, ways, factory)
        expected, _ = train(world, plain, factory, steps=1)
        found, _ = train(world, ways["compiled"], factory, steps=1)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-8)


def in_bf16(world: World) -> None:
    """Compiled blocks in bf16 have the same weights sharded and whole, with and without weights in fp32."""
    for master in (True, False):
        whole_model = partial(DDP, STRATEGY, world, compilation=BLOCKS)
        parts = partial(FSDP, OPTIONS, world, compilation=BLOCKS, gathers_bf16=master)
        expected, ids = train(world, whole_model, partial(lowered, True, master))
        found, ids_of_parts = train(world, parts, partial(lowered, False, master))
        assert len(ids) == len(ids_of_parts) == 1
        assert all(torch.equal(found[key], expected[key]) for key in expected), master


def lowered(copies: bool, stays_fp32: bool) -> Any:
    return lower(build(), copies, stays_fp32)


def two_workers(world: World) -> None:
    """Everything that two workers show."""
    same_bits(world)
    divided_layers(world)
    in_bf16(world)
