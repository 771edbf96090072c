"""The job that every program of a race does.

The same batches in the same order, from the same weights, the same records.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.peers.common import Report, load, model
from benchmarks.peers.examples_mnist import Digits

EVERY = 50
"""Steps from one record of the loss to the next."""
RATE = 0.01
"""Small, so that another order of summation stays one of the last bits for all of a race."""
_SHIFT = torch.tensor(-0.1307 / 0.3081)


@dataclass
class Job:
    """One rank's part of the job."""

    data: str
    order: str
    folder: str
    model: str
    workers: int
    fast: bool = False

    @classmethod
    def typed(cls) -> Job:
        """Read the words that every program of a race is given, and compute with one thread."""
        torch.set_num_threads(1)
        return cls(**vars(parser().parse_args()))

    def rows(self, rank: int) -> Tensor:
        """Return the samples of a rank. Shapes: (steps, batch)."""
        return torch.from_numpy(np.load(self.order, mmap_mode="r")[rank].copy())

    def all_rows(self) -> Tensor:
        """Return the samples of all ranks in turn. Shapes: (steps * ranks, batch)."""
        return torch.from_numpy(np.load(self.order)).transpose(0, 1).flatten(0, 1)

    def network(self) -> nn.Module:
        """Build the model with the first weights."""
        return model(self.model)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of `optimizer=sgd`."""
        return torch.optim.SGD(network.parameters(), RATE, momentum=0.9, nesterov=True)

    def batches(self, rows: Tensor) -> Any:
        """Yield the batches: gathered whole with `fast`, else sample by sample through a DataLoader.

        As manuals show it.
        """
        if self.fast:
            return DataLoader(Whole(self.data), batch_size=None, sampler=rows)  # type: ignore[arg-type]
        return DataLoader(Single(self.data, "train"), batch_sampler=Batches(rows))

    def keep(self, network: nn.Module, report: Report) -> None:
        """Leave the final weights and print the figures. Ranks: rank zero."""
        weights = torch.nn.utils.parameters_to_vector(network.parameters()).detach().numpy()
        np.save(Path(self.folder) / "weights.npy", weights)
        report.show()


def parser() -> argparse.ArgumentParser:
    """Return what understands the words that every program of a race is given."""
    made = argparse.ArgumentParser()
    made.add_argument("--data", required=True)
    made.add_argument("--order", required=True, help="a .npy file: for each rank and step the samples")
    made.add_argument("--folder", required=True, help="where the records and the final weights go")
    made.add_argument("--model", required=True)
    made.add_argument("--workers", type=int, required=True)
    made.add_argument(
        "--fast", action="store_true", help="whole batches from tensors in memory, and what the manual says of speed"
    )
    return made


class Whole:
    """The training images, whole batches at a time."""

    def __init__(self, root: str) -> None:
        """Read the files."""
        pixels, digits = load(root, "train")
        self.images, self.labels = torch.from_numpy(pixels.copy()).unsqueeze(1), torch.from_numpy(digits.copy()).long()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gather a batch and normalise it."""
        return _normalised(self.images.index_select(0, rows)), self.labels.index_select(0, rows)


class Single(Digits):
    """The training images one at a time, with the arithmetic of whole batches.

    Other last bits would grow for all of a race.
    """

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Convert one image and normalise it."""
        return _normalised(torch.from_numpy(self.images[index].copy()).unsqueeze(0)), int(self.labels[index])


def _normalised(pixels: Tensor) -> Tensor:
    images = pixels.float()
    return torch.add(
        _SHIFT, images, alpha=1 / (255 * 0.3081), out=images
    )  # one pass, where a product and a difference are two


class Batches:
    """A batch sampler over a list that is there already."""

    drop_last = True

    def __init__(self, rows: Tensor) -> None:
        """Take the samples of each batch. Shapes: (batches, batch)."""
        self.rows = rows
        self.batch_size = rows.shape[1]

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.rows)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of a batch."""
        for row in self.rows:
            yield row.tolist()
