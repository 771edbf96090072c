"""Functions of a test that run on every rank of one process group."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from ddpexp.compat import lazy_dynamo
from ddpexp.distributed.world import World
from ddpexp.errors import WorkerError
from ddpexp.launch import Layout, WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.workers.control import Control
from ddpexp.train.process import run_rank
from tests.conftest import calling


def main(module: str, case: str, size: str) -> int:
    """Run a function of a module with this rank's world; what follows its name and a space is passed to it, too."""
    name, *arguments = case.split(" ", 1)

    def work(control: Control) -> None:
        lazy_dynamo.defer()
        torch.set_num_threads(1)
        world = World.join(Layout(1, int(size), "cpu", "gloo", 1))
        getattr(importlib.import_module(module), name)(world, *arguments)
        world.barrier()

    return run_rank(work)


def launch(module: str, case: str, size: int, logs: Path) -> None:
    """Run a function of a module on so many ranks."""
    Spawn().launch(calling("tests.strategy.on_ranks:main", [module, case, str(size)], logs, WorkerRequest(gpus=size)))


def works(module: str, case: str, size: int, logs: Path) -> None:
    """As `launch`; the test fails with the traceback of the first rank that fails."""
    try:
        launch(module, case, size, logs)
    except WorkerError as error:
        pytest.fail(f"{error.failure.message}\n{error.failure.traceback}")
