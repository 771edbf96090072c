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

from ddpexp.data.loader import load
from ddpexp.errors import CodeError, LoaderError
from tests.conftest import PATIENCE


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
    keys = iter([(0, [index]) for index in range(8)])
    try:
        list(load(Raises(), "train", keys, 1, torch.device("cpu"), PATIENCE))
    except CodeError:
        pass
    assert multiprocessing.active_children() == []


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
    keys = iter([(0, [index]) for index in range(8)])
    batches = cast(Generator[object], load(Leaves(tmp_path / "now"), "train", keys, 1, torch.device("cpu"), 60))
    next(batches)
    with pytest.raises(LoaderError, match="DataLoader worker 0 ended with exit code 3"):
        wait_carelessly(tmp_path / "now")
    batches.close()
