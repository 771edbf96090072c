"""Where the pieces of the benchmark on GPUs run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.equal import RECIPE
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches

_RARE = 1_000_000  # steps from one checkpoint to the next where none is wanted


@dataclass(frozen=True)
class Place:
    """Where the pieces run, and how large."""

    folder: Path  # scratch
    device: str  # cuda, or cpu to try every line without a GPU
    quick: bool  # tiny, and not compiled
    gpus: int
    say: Callable[[str], None] = print

    @property
    def environ(self) -> Mapping[str, str]:
        """Return what the programs get in addition."""
        return {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}

    def images(self, shape: tuple[int, ...]) -> Path:
        """Write random images once, brighter the higher the label: something to learn."""
        count = 256 if self.quick else shape[0]
        folder = self.folder / f"images-{'x'.join(map(str, shape[1:]))}"
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        draw = np.random.default_rng(0)
        for part, number in (("train", count), ("test", 128)):
            labels = draw.integers(0, 10, number)
            noise = draw.integers(0, 148, (number, *shape[1:]), dtype=np.uint8)
            np.save(folder / f"{part}-images.npy", noise + (12 * labels).astype(np.uint8).reshape(-1, 1, 1, 1))
            np.save(folder / f"{part}-labels.npy", labels)
        return folder

    def order(self, samples: int, batch: int, steps: int) -> Path:
        """Write which samples ddpexp takes in each step, for the loop by hand."""
        path = self.folder / f"order-{samples}-{batch}-{steps}.npy"
        plan = plan_batches(batch, "auto", 1)
        rows = TrainBatches(range(samples), plan, 0, 0, torch.device("cpu")).indices(0, steps)
        np.save(path, np.stack(list(rows)))
        return path

    def command(self, run: Path, *overrides: str) -> list[str]:
        """Return a run of ddpexp with one worker, unless the overrides have another number."""
        given = {override.partition("=")[0] for override in overrides}
        defaults = [
            "recipe=raced", f"trainer.device={self.device}", "trainer.gpus=1", "trainer.precision=bf16",
            f"trainer.checkpoint_every={_RARE}", f"run.dir={run}",
        ]  # fmt: skip
        defaults = [override for override in defaults if override.partition("=")[0] not in given]
        return [sys.executable, "-m", "ddpexp", "--config-dir", RECIPE, *defaults, *overrides]
