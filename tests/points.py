"""A user's recipe of a second, points on two sides of a plane, for tests that need a model.

Data or a task of their own.
"""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from ddpexp.checkpoint.format import complete_checkpoints
from tests.conftest import PATIENCE, TAG, ZYGOTES, Ddpexp, Done, finish

CODE = """\
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from ddpexp.data.datasets import Arrays, Splits

RANK = int(os.environ.get("RANK", "0"))


def points(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 4, generator=generator)
    return Arrays((torch.arange(count), rows, (rows.sum(1) > 0).long()))


def load(train=96, test=33):
    return Splits(points(train, 0), {"eval": points(test, 1)})


class Items(Dataset):
    # The same points, one at a time.
    def __init__(self, count, seed):
        self.rows = points(count, seed)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in self.rows.tensors)


def load_items(train=96, test=33):
    return Splits(Items(train, 0), {"eval": Items(test, 1)})


class Net(nn.Sequential):
    def __init__(self, hidden=8, dropout=0.0):
        super().__init__(nn.Linear(4, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 2))


class Sides:
    def step(self, model, batch):
        _, rows, labels = batch
        scores = model(rows)
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}
"""

CONFIGS = {
    "recipe/points.yaml": """\
# @package _global_
defaults:
  - override /model: net
  - override /data: points
  - override /optimizer: sgd
  - override /logger: none
recipe:
  name: points
task:
  _target_: points.Sides
trainer:
  epochs: 2
  global_batch_size: 24
  log_every: 4
""",
    "model/net.yaml": "_target_: points.Net\nhidden: 8\ndropout: 0.0\n",
    "data/points.yaml": "_target_: points.load\ntrain: 96\ntest: 33\nnum_workers: 0\nvalidation_fraction: 0.0\n",
}


LARGE = """\
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Large(nn.Sequential):
    # 33.6 million parameters.
    def __init__(self, width=512, blocks=16):
        super().__init__(nn.Linear(4, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 2))
"""
"""Code that a test may add: a model whose memory shows beside that of torch, in blocks."""
ITEMS = ("data._target_=points.load_items", "data.num_workers=2")
"""The same data through torch's DataLoader."""


class Recipe:
    """The recipe `points` in a folder of its own, with what a test adds to its code, and the command that trains it."""

    def __init__(self, ddpexp: Ddpexp, code: str = "") -> None:
        self.ddpexp = ddpexp
        self.folder = ddpexp.folder / "project"
        self._count = 0
        for name, text in {
            **{f"conf/{name}": text for name, text in CONFIGS.items()},
            "points.py": f"{CODE}\n\n{code}",
        }.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def __call__(
        self, *overrides: str, timeout: float = PATIENCE, environ: dict[str, str] | None = None, run: Path | None = None
    ) -> Done:
        process, run = self.start(*overrides, environ=environ, run=run)
        return finish(process, run, timeout)

    def start(
        self, *overrides: str, environ: dict[str, str] | None = None, run: Path | None = None
    ) -> tuple[subprocess.Popen[str], Path]:
        """Start the command, in a run directory of its own or in that of a run before."""
        arguments, run = self.words(*overrides, run=run)
        process, _ = self.ddpexp.start(*arguments, environ=environ)
        return process, run

    def module(self) -> Any:
        """Import the recipe's code into this process."""
        spec = importlib.util.spec_from_file_location("points", self.folder / "points.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def words(self, *overrides: str, run: Path | None = None) -> tuple[list[str], Path]:
        """Return the arguments after `ddpexp`, and the run directory that they name.

        One of its own unless one is given.
        """
        if run is None:
            self._count += 1
            run = self.ddpexp.folder / f"points{self._count}"
        return ["--config-dir", str(self.folder / "conf"), "recipe=points", f"run.dir={run}", *overrides], run


def weights(done: Done) -> dict[str, Tensor]:
    """Return the final weights of a run."""
    folder = complete_checkpoints(done.run / "checkpoints")[0]
    return {
        path.stem + "." + name: tensor
        for path in folder.glob("*.safetensors")
        if not path.name.startswith("state.")
        for name, tensor in load_file(path).items()
    }


def session(pid: int) -> dict[int, int]:
    """Return the living processes of a command with this id, each with its parent's id; no other may run beside it.

    Workers have sessions of their own, so what identifies them is the tests' mark in their environment.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) in ZYGOTES:
            continue
        try:
            state, parent, _, leader = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            marked = TAG.encode() in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (marked or int(leader) == pid) and state != "Z":
            found[int(entry.name)] = int(parent)
    return found


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until the condition holds; fail after `seconds`."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            pytest.fail(f"not within {seconds} s")
        time.sleep(0.01)
