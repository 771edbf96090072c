"""The death of a DataLoader worker, wherever its rank is just then."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import suppress
from typing import cast

import pytest
import torch

from ddpexp.data.loader import load
from ddpexp.errors import LoaderError


class Leaves:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(0.5)
            os._exit(3)
        return index


def wait_carelessly() -> None:
    with suppress(Exception):
        time.sleep(10)


def test_it_is_not_caught_by_those_who_catch_every_exception() -> None:
    keys = iter([(0, [index]) for index in range(8)])
    batches = cast(Generator[object], load(Leaves(), "train", keys, 1, torch.device("cpu"), 60))
    next(batches)
    with pytest.raises(LoaderError, match="DataLoader worker 0 ended with exit code 3"):
        wait_carelessly()
    batches.close()
