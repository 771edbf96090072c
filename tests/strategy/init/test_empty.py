"""strategy.init=reset_parameters: models that are built without memory, and initialized one module at a time."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddpexp.checkpoint.loading import load_weights
from ddpexp.distributed.world import World
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.init.construction import RESET
from ddpexp.strategy.init.empty import Resets, build_empty
from ddpexp.train.initial_weights import held
from tests.fitting import ALONE
from tests.ranks import on_ranks
from tests.refusals import refused
from tests.strategy.fsdp.ranks import OPTIONS, Block, seeded

RESETS = replace(OPTIONS, init="reset_parameters")


class Reads(nn.Module):
    """A model that looks at values of tensors while it is built, as those with stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.embedding, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3, 3).tril())
        nn.init.zeros_(self.attention.in_proj_weight)
        with torch.no_grad():
            self.embedding.weight[0].fill_(3)


def drawn(model: nn.Module) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    Resets({"model": model}).draw(lambda name, tensor: values.update({name: tensor.detach().clone()}))
    return values


def test_parameters_lose_their_memory_and_everything_else_keeps_its_values() -> None:
    model = build_empty(Reads, "strategy.init=reset_parameters")
    assert isinstance(model, Reads)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert model.get_buffer("mask").sum() == 6
    assert model.rates == [0, 0.5, 1]
    assert not nn.Linear(1, 1).weight.is_meta  # what was replaced is back


def test_each_module_draws_its_own_parameters() -> None:
    model = build_empty(seeded(Reads), "strategy.init=reset_parameters")
    torch.manual_seed(5)
    values = drawn(model)
    torch.manual_seed(5)
    assert values["model.embedding.weight"].equal(nn.Embedding(11, 6).weight)
    assert values["model.norm.weight"].equal(torch.ones(6))
    assert values["model.attention.in_proj_weight"].std() > 0.1
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_cannot_be_initialized_is_refused_by_name() -> None:
    with refused("model.shift: Block"):
        drawn(build_empty(lambda: Block(3, 4), "strategy.init=reset_parameters"))

    def looks() -> nn.Module:
        model = nn.Linear(2, 2)
        if model.weight.sum() > 0:
            nn.init.zeros_(model.bias)
        return model

    with refused("strategy.init=reset_parameters: strategy.init=whole"):
        build_empty(looks, "strategy.init=reset_parameters")


def test_the_weights_are_the_same_at_every_number_of_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ddpexp"):
        alone = FSDP(RESETS, ALONE, seeded(Reads)).modules["model"].state_dict()
    assert [record.message for record in caplog.records] == [RESET]
    assert not any(tensor.isnan().any() for tensor in alone.values())

    def whole(world: World) -> dict[str, Tensor]:
        state = FSDP(RESETS, world, seeded(Reads)).modules["model"].state_dict()
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}

    for found in on_ranks(tmp_path, 3, whole):
        assert found.keys() == alone.keys()
        assert all(found[name].equal(tensor) for name, tensor in alone.items())


@pytest.mark.parametrize("init", ["replay", "reset_parameters"])
def test_what_is_loaded_anyway_gets_no_values(init: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, init=init).to_be_loaded()  # type: ignore[arg-type]

    def missing(world: World) -> list[str]:
        model = FSDP(options, world, seeded(lambda: Block(3, 4))).modules["model"]
        return [name for name, value in model.named_parameters() if value.to_local().isnan().all()]  # type: ignore[attr-defined]

    assert on_ranks(tmp_path, 2, missing)[0] == [name for name, _ in Block(3, 4).named_parameters()]
    assert isinstance(options, FSDPOptions)


def test_a_model_that_cannot_be_replayed_starts_from_weights(tmp_path: Path) -> None:
    given = Reads()
    save_model(given, str(tmp_path / "weights.safetensors"))
    given_state = given.state_dict()
    options = replace(OPTIONS, init="replay").to_be_loaded()

    def loaded(world: World) -> bool:
        path = tmp_path / "weights.safetensors"
        prepare = partial(load_weights, source=path, description="run.init_from=weights.safetensors", held=held)
        model = FSDP(options, world, seeded(Reads), prepare=prepare).modules["model"]  # type: ignore[arg-type]
        return all(
            (value.full_tensor() if isinstance(value, DTensor) else value).equal(given_state[name])
            for name, value in model.state_dict().items()
        )

    (tmp_path / "ranks").mkdir()
    assert on_ranks(tmp_path / "ranks", 2, loaded) == [True, True]
