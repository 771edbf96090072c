"""Which stage has which layers and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.strategy.pipeline.schedule import Pipe
from ddpexp.strategy.pipeline.stages import divide
from recipes.gpt import GPT
from recipes.mnist import LeNet
from tests.refusals import refused


def gpt(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return GPT(**{"vocab_size": 11, "block_size": 4, "num_layers": 4, "num_heads": 4, "width": 16, **options})


class Chain(nn.Module):
    """Layers `a` and `b`, and whatever `pipeline_layers` says of them."""

    def __init__(self, layers: Sequence[Sequence[str]], **extra: Any) -> None:
        super().__init__()
        self.a, self.b, self.pipeline_layers = nn.Linear(2, 2), nn.Linear(2, 2), layers
        for name, value in extra.items():
            setattr(self, name, value)

    def forward_layers(self, layers: range, x: Tensor) -> Tensor:
        for number in layers:
            x = (self.a, self.b)[number](x)
        return x


def test_stages_get_as_many_layers_or_begin_with_the_named_ones() -> None:
    assert divide({"model": gpt()}, Pipe(2), None).bounds == [0, 3, 6]
    assert divide({"model": gpt()}, Pipe(3), ("h.0", "ln_f")).bounds == [0, 1, 5, 6]
    assert divide({"model": LeNet()}, Pipe(4), None).bounds == [0, 2, 5, 7, 10]


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    tied, own = divide({"model": gpt()}, Pipe(3), None), divide({"model": gpt(tied=False)}, Pipe(3), None)
    assert tied.stages_of("wte.weight") == [0, 2]
    assert own.stages_of("wte.weight") == [0]
    assert own.stages_of("lm_head.weight") == [2]
    assert tied.stages_of("h.1.attn.c_attn.weight") == [1]
    assert own.stages_of("h") == []


def test_a_worker_has_every_second_stage_of_an_interleaved_pipeline() -> None:
    division = divide({"model": gpt()}, Pipe(2, 2), None)
    assert division.bounds == [0, 1, 3, 4, 6]
    assert division.stages_of("wte.weight") == [0, 3]
    assert division.places_of("wte.weight") == [0, 1]
    assert [division.places_of(f"h.{layer}.ln_1.weight") for layer in range(4)] == [[1], [1], [0], [1]]
    with refused("strategy.pp_size=4: strategy.pp_size=3"):
        divide({"model": gpt()}, Pipe(4, 2), None)


def test_the_stages_together_compute_what_the_model_does() -> None:
    for model, x in ((LeNet(), torch.randn(3, 1, 28, 28)), (Chain([["a"], ["b"]]), torch.randn(3, 2))):
        division = divide({"model": model}, Pipe(2), None)
        halfway = division.forward(division.of_stage(0), x)
        whole = division.forward(range(len(division.layers)), x)
        assert torch.equal(division.forward(division.of_stage(1), halfway), whole)
        if isinstance(model, LeNet):
            assert torch.equal(whole, model(x))


@pytest.mark.parametrize(
    ("model", "size", "split", "expected"),
    [
        (gpt(), 7, None, "strategy.pp_size=7: strategy.pp_size=6"),
        (gpt(), 2, ("h.9",), "h.9: wte, h.0, h.1, h.2, h.3"),
        (gpt(), 3, ("h.2", "h.1"), "strategy.split_before=[h.2,h.1]: without layers"),
        (gpt(), 2, ("wte",), "strategy.split_before=[wte]: without layers"),
        (nn.Linear(2, 2), 2, None, "strategy=pipeline: nn.Sequential"),
        (Chain([["a"], ["c"]]), 2, None, "Chain.pipeline_layers: names c"),
        (Chain([["a"], ["a"]]), 2, None, "Chain.pipeline_layers: b.weight"),
        (Chain([["a"], ["b", "s"]], s=nn.Parameter(torch.ones(()))), 2, None, "s is a parameter: shape (1,)"),
        (nn.Sequential(nn.LazyLinear(2), nn.Tanh()), 2, None, "0.weight: no shape"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: nn.Module, size: int, split: tuple[str, ...] | None, expected: str
) -> None:
    with refused(expected):
        divide({"model": model}, Pipe(size), split)


def test_several_models_are_refused() -> None:
    with refused("strategy=pipeline: g, d"):
        divide({"g": LeNet(), "d": LeNet()}, Pipe(2), None)
