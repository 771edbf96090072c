"""The start of a pipeline that no worker could hold whole: the values are those of an ordinary construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from ddpexp.checkpoint.loading import load_weights
from ddpexp.distributed.world import World
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.pipeline.strategy import Pipeline
from ddpexp.train.initial_weights import held
from recipes.gpt import GPT
from tests.memory import peak_of
from tests.ranks import on_ranks
from tests.strategy.fsdp.ranks import seeded

OPTIONS = PipelineOptions("pipeline", 2, None, "1f1b")
REPLAY = replace(OPTIONS, init="replay")
LAYERS, WIDTH = 4, 3072
LAYER = WIDTH * WIDTH * 4  # bytes: above 32 MiB, so that glibc returns it at once when it is freed
MODEL = LAYERS * LAYER
FEW = LAYER + (4 << 20)  # beside the share: a layer, and what a rank allocates for communication


def tied() -> nn.Module:
    return GPT(vocab_size=16, block_size=4, num_layers=3, num_heads=4, width=16)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 2))


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def parts(options: PipelineOptions, world: World, factory: Callable[[], nn.Module], **more: Any) -> dict[str, Tensor]:
    """Return what this rank has of a model."""
    module = Pipeline(options, world, seeded(factory), 2, **more).modules["model"]
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (tied, {}),
        (tied, {"tp_size": 2}),
        (tied, {"schedule": "interleaved", "stages_per_worker": 2}),
        (normed, {"dp_shard_size": 2}),
    ],
    ids=["tied", "tensor", "interleaved", "normed"],
)
def test_the_values_are_those_of_a_model_that_is_built_whole(
    factory: Callable[[], nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    save_model(factory(), str(path))  # other values than the seeded ones
    load = partial(load_weights, source=path, description="run.init_from", held=held)

    def start(world: World) -> list[str]:
        whole, replayed = (replace(OPTIONS, **options, init=init) for init in ("whole", "replay"))
        differing = []
        for found, expected in (
            (parts(replayed, world, factory), parts(whole, world, factory)),
            (parts(replayed, world, factory, prepare=load), parts(whole, world, factory, prepare=load)),
            (parts(replayed.to_be_loaded(), world, factory, prepare=load), parts(whole, world, factory, prepare=load)),
        ):
            assert found.keys() == expected.keys()
            differing += [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
        rows = [len(tensor) for tensor in found.values() if tensor.dim()]
        assert 0 in rows
        assert any(rows)
        return differing

    (tmp_path / "ranks").mkdir()
    assert on_ranks(tmp_path / "ranks", 4, start) == [[]] * 4


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    "options",
    [REPLAY, REPLAY.to_be_loaded(), replace(OPTIONS, init="reset_parameters"), OPTIONS],
    ids=["replay", "to be loaded", "reset_parameters", "whole"],
)
def test_no_worker_holds_the_whole_model_unless_it_is_built_whole(options: PipelineOptions, tmp_path: Path) -> None:
    def start(world: World) -> int:
        Pipeline(
            replace(options, pp_size=4), world, seeded(lambda: nn.Sequential(*map(nn.Linear, [8] * 4, [8] * 4))), 4
        )
        return peak_of(lambda: Pipeline(replace(options, pp_size=4), world, seeded(large), 4))

    share = 1 if options.init == "whole" else 4
    for peak in on_ranks(tmp_path, 4, start):
        assert isinstance(peak, int), peak
        assert MODEL / share * 0.9 < peak < MODEL / share + FEW, (
            f"{peak / 2**20:.1f} MiB, {(peak - MODEL / share) / 2**20:.1f} beyond the share"
        )
