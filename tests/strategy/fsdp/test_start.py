"""The start of a sharded model: no worker ever holds more of it than its share and a few tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_model
from torch import nn

from ddpexp.checkpoint.loading import load_weights
from ddpexp.distributed.world import World
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.sharding import held
from ddpexp.strategy.fsdp.strategy import FSDP
from tests.memory import peak_of
from tests.ranks import on_ranks
from tests.strategy.fsdp.ranks import OPTIONS, seeded

LAYERS, WIDTH = 4, 3072
LAYER = WIDTH * WIDTH * 4  # bytes: above 32 MiB, so that glibc returns it at once when it is freed
MODEL = LAYERS * LAYER
FEW = LAYER + (4 << 20)  # beside the share: a layer, and what a rank allocates for communication


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    ("options", "loads", "share"),
    [
        (replace(OPTIONS, init="replay"), False, 4),
        (replace(OPTIONS, init="replay").to_be_loaded(), True, 4),
        (replace(OPTIONS, init="reset_parameters"), False, 4),
        (replace(OPTIONS, init="replay", dp_replicate_size=2), False, 2),
        (OPTIONS, False, 1),
    ],
    ids=["replay", "init_from", "reset_parameters", "hybrid", "whole"],
)
def test_no_worker_holds_the_whole_model_unless_it_is_built_whole(
    options: FSDPOptions, loads: bool, share: int, tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    if loads:
        save_model(large(), str(path))
    load = partial(load_weights, source=path, description="run.init_from", held=held)

    def start(world: World) -> int:
        FSDP(options, world, seeded(lambda: nn.Linear(8, 8)))  # what a first start allocates
        prepare: Any = load if loads else lambda models: None
        return peak_of(lambda: FSDP(options, world, seeded(large), prepare=prepare))

    (tmp_path / "ranks").mkdir()
    for peak in on_ranks(tmp_path / "ranks", 4, start):
        assert isinstance(peak, int), peak
        assert MODEL / share * 0.9 < peak < MODEL / share + FEW, (
            f"{peak / 2**20:.1f} MiB, {(peak - MODEL / share) / 2**20:.1f} beyond the share"
        )
