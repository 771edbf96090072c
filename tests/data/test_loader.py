"""The death of a DataLoader worker, wherever its rank is just then."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch

from ddpexp.data.adapters import MapStyle
from ddpexp.data.loader import Key, load
from ddpexp.errors import CodeError, LoaderError
from tests.conftest import PATIENCE, Ddpexp
from tests.points import Recipe


class Raises:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        raise ValueError(index)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_an_error_of_a_sample_ends_the_workers_with_it() -> None:
    """Workers ignore SIGTERM: what is left to multiprocessing's own end would have the process wait for ever."""
    keys = iter([Key(0, [index]) for index in range(8)])
    try:
        list(load(MapStyle(Raises()), "train", keys, 1, torch.device("cpu"), PATIENCE))
    except CodeError:
        pass
    assert multiprocessing.active_children() == []


@pytest.mark.smoke
@pytest.mark.usefixtures("_no_collector")
def test_a_loader_that_is_left_early_ends_its_workers_at_once() -> None:
    batches = load(
        MapStyle([1, 2, 3, 4]), "train", iter([Key(0, [index]) for index in range(3)]), 2, torch.device("cpu"), PATIENCE
    )
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    cast("Generator[object]", batches).close()
    del batches
    assert multiprocessing.active_children() == []


COLLECTS = """\
import gc

class Left:
    # Garbage of a rank, which only the collector finds.
    def __init__(self):
        self.itself, self.owner = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            print("collected in a fork", flush=True)

class Collecting(Items):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)

def load_garbage():
    gc.disable()
    Left()
    return Splits(Collecting(96, 0), {"eval": Collecting(33, 1)})
"""


def test_the_worker_of_a_loader_collects_nothing_that_its_rank_has_left(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp, COLLECTS)
    done = recipe("data._target_=points.load_garbage", "data.num_workers=1", "trainer.gpus=1", "trainer.max_steps=2")
    assert (done.code, done.err) == (0, "")
    assert "collected" not in done.out + (done.run / "ranks/0.log").read_text()


@dataclass(frozen=True)
class Leaves:
    """Ends the process that reads a second sample, once the file is there."""

    when: Path

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index:
            while not self.when.exists():
                time.sleep(0.01)
            os._exit(3)
        return index


def wait_carelessly(mark: Path) -> None:
    with suppress(Exception):
        mark.touch()
        time.sleep(PATIENCE)


def test_it_is_not_caught_by_those_who_catch_every_exception(tmp_path: Path) -> None:
    keys = iter([Key(0, [index]) for index in range(8)])
    batches = cast(
        Generator[object], load(MapStyle(Leaves(tmp_path / "now")), "train", keys, 1, torch.device("cpu"), 60)
    )
    next(batches)
    with pytest.raises(LoaderError, match="DataLoader worker 0 ended with exit code 3"):
        wait_carelessly(tmp_path / "now")
    batches.close()
