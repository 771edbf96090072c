"""Functions of test_strategy.py that run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.tensor.strategy import TensorParallel
from ddpexp.train.activation_checkpointing import checkpoint_activations
from recipes.gpt import GPT
from tests.refusals import refused
from tests.strategy.fsdp.ranks import OPTIONS

STEPS, BATCH, TOKENS = 4, 4, 8
SIZES: dict[str, Any] = {"vocab_size": 12, "block_size": TOKENS, "num_layers": 2, "num_heads": 4, "width": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {"bias": True},
    "llama": {
        "tied": False, "mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "num_kv_heads": 2, "hidden": 24
    },
    "conv1d": {"conv1d": True, "bias": True, "mlp": "gelu_tanh"},
}  # fmt: skip


def build(variant: str) -> GPT:
    torch.manual_seed(3)
    return GPT(**SIZES, **VARIANTS[variant]).double()


def batch(step: int) -> Tensor:
    """Shapes: (samples, tokens + 1)."""
    return torch.randint(0, 12, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """The sum over the samples, divided by the global number of tokens."""
    scores = model(rows[:, :-1])
    loss = functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return loss / (BATCH * TOKENS)


def alone(variant: str, limit: float) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights of one process, and the norm of the gradient in each step."""
    model = build(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return dict(model.state_dict()), norms


def whole(strategy: TensorParallel, world: World, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of which each rank writes a part; checks that each element has one writer."""
    shard = strategy.shard_to_save(name, tensor)
    assert shard.columns is None
    if shard.first_row is None:
        return shard.tensor.detach()
    values = torch.zeros(shard.shape, dtype=tensor.dtype)
    writers = torch.zeros(shard.shape)
    if shard.replica == 0:
        rows = torch.cat([torch.arange(block.start, block.stop) for block in shard.blocks])
        values[rows], writers[rows] = shard.tensor.detach(), 1.0
    assert bool((world.sum(writers) == 1).all()), name
    return world.sum(values)


def equal(world: World) -> None:
    """Weights, norms and states are those of one process, also where the other ranks shard or hold replicas."""
    for variant, init, by_tokens in [
        ("gpt", "whole", False), ("llama", "replay", True), ("conv1d", "whole", True),
        ("llama", "reset_parameters", False),
    ]:  # fmt: skip
        options = replace(OPTIONS, tp_size=2, init=init, sequence_parallel=by_tokens)  # type: ignore[arg-type]
        if init == "reset_parameters":  # whose weights are loaded
            options = options.to_be_loaded()
        strategy = TensorParallel(options, world, partial(build, variant), prepare=loader(variant, init))
        model = strategy.modules["model"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        expected, expected_norms = alone(variant, 0.5)
        size = BATCH // strategy.data.size
        own = slice(strategy.data.rank * size, (strategy.data.rank + 1) * size)
        norms = []
        for step in range(STEPS):
            with strategy.micro_batch(last=True):
                loss = loss_of(strategy.train_model, batch(step)[own]) * strategy.gradient_weight
                loss.backward()  # type: ignore[no-untyped-call]
            parameters = list(strategy.parameters())
            on_gpus = float(strategy._norm_of_parts(parameters, torch.float64))
            norms.append(float(strategy.clip(parameters, 0.5)))
            assert on_gpus == pytest.approx(norms[-1], rel=1e-10)
            optimizer.step()
            strategy.clear_gradient()
        torch.testing.assert_close(norms, expected_norms, rtol=1e-10, atol=0.0)
        for name, tensor in model.state_dict().items():
            found = whole(strategy, world, f"model.{name}", tensor)
            torch.testing.assert_close(found, expected[name], rtol=1e-8, atol=1e-10, msg=f"{variant} {name}")
        states = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
        shapes = {name: strategy.shard(f"model.{name}", state).shape for name, state in states.items()}
        assert shapes == {name: tuple(expected[name].shape) for name in shapes}
        held = sum(strategy.shard(f"model.{n}", p).tensor.numel() for n, p in model.named_parameters())
        divided = {name.removeprefix("model.") for name in strategy._sharding.shares}
        assert len(divided) >= 8
        if strategy.data.size == 1:
            total = sum(p.numel() / (2 if name in divided else 1) for name, p in build(variant).named_parameters())
            assert held == total
        assert (strategy.data.rank, strategy.data.reports) == (world.rank // 2, world.rank % 2 == 0)
        assert strategy.on_any_rank(torch.tensor(float(world.rank == world.world_size - 1))) == 1


def loader(variant: str, init: str) -> Callable[[Any], None]:
    """Return what loads the weights, as run.init_from does, where they are not drawn."""

    def load(models: Any) -> None:
        if init == "reset_parameters":
            from ddpexp.train.initial_weights import held

            given = build(variant).state_dict()
            for name, tensor in models["model"].state_dict(keep_vars=True).items():
                with torch.no_grad():
                    shard = held(tensor)
                    rows = given[name]
                    read = lambda first, num, rows=rows: rows[first : first + num]  # noqa: E731
                    shard.tensor.copy_(rows if shard.first_row is None else shard.read(read))

    return load


def tokens(world: World) -> None:
    """Between divided layers ranks draw other dropout, and alike again behind them; in evaluation they have all."""
    options = replace(OPTIONS, tp_size=2, sequence_parallel=True)

    def built(dropout: float, again: bool = False) -> TensorParallel:
        def make() -> nn.Module:
            torch.manual_seed(3)
            return GPT(**{**SIZES, "dropout": dropout, "bias": True})

        def prepare(models: Any) -> None:
            if again:
                checkpoint_activations(models, ["Block"])

        return TensorParallel(options, world, make, prepare=prepare)

    strategy = built(0.5)
    model: Any = strategy.modules["model"]
    dropped: list[Tensor] = []
    model.h[0].attn.resid_dropout.register_forward_hook(lambda module, inputs, out: dropped.append(out == 0))
    torch.manual_seed(7)
    model(batch(0)[:, :-1])
    [own] = dropped
    assert own.shape == (BATCH, TOKENS // 2, 16)
    zeros = torch.zeros(2, *own.shape)
    zeros[world.rank] = own.float()
    first, second = world.sum(zeros)
    assert not torch.equal(first, second)
    assert 0.3 < float(first.mean()) < 0.7
    drawn = torch.zeros(2)
    drawn[world.rank] = torch.rand(())
    assert len(set(world.sum(drawn).tolist())) == 1
    with refused("strategy.sequence_parallel=true: the shape [4, 7, 16]", DdpexpError):
        model(batch(0)[:, :7])
    with strategy.evaluation() as evaluated:
        torch.manual_seed(3)
        expected = GPT(**{**SIZES, "bias": True}).eval()
        torch.testing.assert_close(evaluated(batch(0)[:, :7]), expected(batch(0)[:, :7]), rtol=1e-4, atol=1e-6)

    def gradients(strategy: TensorParallel) -> list[Tensor]:
        torch.manual_seed(9)
        with strategy.micro_batch(last=True):
            loss_of(strategy.train_model, batch(1)).backward()  # type: ignore[no-untyped-call]
        return strategy.gradient_values(strategy.parameters())

    for one, other in zip(gradients(built(0.2)), gradients(built(0.2, again=True)), strict=True):
        assert torch.equal(one, other)


def inputs(world: World) -> None:
    """Layers with one input sum its gradient once; a tied embedding that is divided is refused."""
    import torch.distributed as dist

    class Three(nn.Module):
        tensor_plan = (
            {"match": ("q_proj", "k_proj", "v_proj"), "style": "colwise"}, {"match": "o_proj", "style": "rowwise"},
        )  # fmt: skip

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 6) for _ in range(3))
            self.o_proj = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.o_proj(self.q_proj(x) * self.k_proj(x) + self.v_proj(x))
            return result

    strategy = TensorParallel(replace(OPTIONS, tp_size=2), world, Three)
    count = 0
    original = dist.all_reduce

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments, **named)

    x = torch.ones(2, 4, requires_grad=True)
    dist.all_reduce = counted
    try:
        strategy.train_model(x).sum().backward()
    finally:
        dist.all_reduce = original
    assert count == 2, count
    one, y = Three(), torch.ones(2, 4, requires_grad=True)
    one(y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.grad)
    for tied, expected in tied_embeddings():
        with refused(expected):
            TensorParallel(replace(OPTIONS, tp_size=2), world, tied)


def tied_embeddings() -> Iterator[tuple[Callable[[], nn.Module], str]]:
    class Tied(nn.Module):
        tensor_plan = ({"match": "head", "style": "colwise_gather_output"},)

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

    yield Tied, "head and embedding have the same weight: divides only that"

    class TwoWays(Tied):
        tensor_plan = (
            {"match": "head", "style": "rowwise"}, {"match": "embedding", "style": "embedding_rowwise"},
        )  # type: ignore[assignment]  # fmt: skip

    yield TwoWays, "have the same weight: divides it in two ways"
