"""The start of a sharded model: no worker ever holds more of it than its share and a few tensors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
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
from tests.ranks import on_ranks
from tests.strategy.fsdp.ranks import OPTIONS, seeded

LAYERS, WIDTH = 24, 1024
MODEL = LAYERS * WIDTH * WIDTH * 4  # bytes, of which a layer has 4 MiB
FEW = 32 << 20  # beside the share: some layers, and what a rank allocates for communication


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def peak_of(start: Callable[[], Any]) -> int:
    """Return how many bytes this process has more at most while something starts, than before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    kept = start()
    found = memory("VmHWM") - before
    del kept
    return found


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
        assert MODEL / share * 0.9 < peak < MODEL / share + FEW, f"{peak / 2**20:.0f} MiB"
