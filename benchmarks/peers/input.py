"""Read data held in memory, batch by batch on one thread, in one of the ways that there are.

`--way ddpexp|gather|loader|tensors --folder FOLDER --epochs N [--workers N] [--augment]`; prints JSON: the fastest
epoch, as what else runs on a machine only makes them slower. The first is not timed: it tells what was read, so that
other work is found out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

BATCH, FRAME = 128, 4
MEAN, DEVIATION = {1: (0.1307,), 3: (0.4914, 0.4822, 0.4465)}, {1: (0.3081,), 3: (0.247, 0.2435, 0.2616)}
Epoch = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Words:
    """What is typed."""

    way: str
    folder: str
    epochs: int
    workers: int
    augment: bool


def main() -> None:
    """Read as typed and tell how fast."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=list(WAYS), required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--augment", action="store_true")
    words = Words(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    epoch = WAYS[words.way](words)
    found = _looked_at(epoch(0))
    rates = []
    for number in range(1, words.epochs + 1):
        begin = time.perf_counter()
        count = sum(len(images) for images, _ in epoch(number))
        rates.append(count / (time.perf_counter() - begin))
    print(json.dumps({**found, "rate": max(rates)}))


def held(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read the training images into memory. Shapes.

    (samples, channels, height, width), (samples,), (channels, 1, 1) twice.
    """
    images, labels = (torch.from_numpy(np.load(Path(folder) / f"train-{what}.npy")) for what in ("images", "labels"))
    images = images if images.dim() == 4 else images.unsqueeze(1)
    mean, deviation = (torch.tensor(values[images.shape[1]]).view(-1, 1, 1) for values in (MEAN, DEVIATION))
    return images, labels.long(), mean, deviation


def ddpexp(words: Words) -> Epoch:
    """Read as a training run does: files prepared by the command, mapped and cut into batches by a rank."""
    from ddpexp.data.batch_plan import plan_batches
    from ddpexp.data.batches import TrainBatches
    from ddpexp.data.images import dataset as images
    from ddpexp.data.images import files

    channels = 3 if np.load(Path(words.folder) / "train-images.npy", mmap_mode="r").ndim == 4 else 1
    options = {"flip": words.augment, "crop": FRAME if words.augment else 0}
    prepared = files.prepare(words.folder, MEAN[channels], DEVIATION[channels], **options)  # type: ignore[arg-type]
    batches = TrainBatches(images.load(prepared).train, plan_batches(BATCH, "auto", 1), 0, 0, torch.device("cpu"))

    def epoch(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for [batch] in batches.steps(number * batches.steps_per_epoch, (number + 1) * batches.steps_per_epoch):
            yield batch

    return epoch


def gather(words: Words) -> Epoch:
    """Read as the best hand-written loop we know.

    Shuffled numbers, a gather, two passes that normalise, a copy for each cut.
    """
    images, labels, mean, deviation = held(words.folder)
    scale, shift = 1 / (255 * deviation), mean / deviation

    def epoch(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number))
        for begin in range(0, len(labels) // BATCH * BATCH, BATCH):
            rows = order[begin : begin + BATCH]
            pixels = images.index_select(0, rows)
            batch = _cut(pixels) if words.augment else pixels
            yield batch.float().mul_(scale).sub_(shift), labels.index_select(0, rows)

    return epoch


def loader(words: Words) -> Epoch:
    """Read as the tutorials do: a data set of single samples behind torch's DataLoader, with lasting workers."""
    return _loaded(Samples(*held(words.folder), words.augment), words)


def tensors(words: Words) -> Epoch:
    """Read a TensorDataset through the DataLoader, normalised a batch at a time."""
    images, labels, mean, deviation = held(words.folder)

    def collate(samples: list[Any]) -> Any:
        pixels, found = default_collate(samples)
        return pixels.float().div_(255).sub_(mean).div_(deviation), found

    return _loaded(TensorDataset(images, labels), words, collate)


class Samples(Dataset[Any]):
    """One sample at a time, converted, cut and normalised on the way."""

    def __init__(self, images: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor, augment: bool) -> None:
        """Hold them."""
        self.images, self.labels, self.mean, self.deviation, self.augment = images, labels, mean, deviation, augment

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a sample as torchvision's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize would."""
        image = self.images[index]
        if self.augment:
            height, width = image.shape[-2:]
            top, left = torch.randint(2 * FRAME + 1, (2,)).tolist()
            image = pad(image, (FRAME,) * 4)[:, top : top + height, left : left + width]
            if torch.rand(1) < 0.5:
                image = image.flip(-1)
        return image.float().div_(255).sub_(self.mean).div_(self.deviation), int(self.labels[index])


def _cut(pixels: Tensor) -> Tensor:
    """Copy each image's own window out of its framed self, mirrored or not."""
    framed, cut = pad(pixels, (FRAME,) * 4).numpy(), np.empty(pixels.shape, np.uint8)
    height, width = pixels.shape[-2:]
    places = torch.randint(2 * FRAME + 1, (2, len(pixels))).tolist()
    for number, (top, left, flip) in enumerate(zip(*places, (torch.rand(len(pixels)) < 0.5).tolist(), strict=True)):
        window = framed[number, :, top : top + height, left : left + width]
        cut[number] = window[:, :, ::-1] if flip else window
    return torch.from_numpy(cut)


def _loaded(data: Dataset[Any], words: Words, collate: Any = None) -> Epoch:
    many = {"num_workers": words.workers, "persistent_workers": words.workers > 0}
    batches: DataLoader[Any] = DataLoader(data, BATCH, shuffle=True, drop_last=True, collate_fn=collate, **many)  # type: ignore[arg-type]
    return lambda _: iter(batches)


def _looked_at(batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return how many samples there were, how many of them different.

    And the mean squares of both halves of the images.
    """
    numbers, halves = [], []
    for images, labels in batches:
        numbers.append(labels)
        halves.append([half.double().square().mean() for half in images.chunk(2, dim=-1)])
    seen = torch.cat(numbers)
    left, right = torch.tensor(halves).mean(0).tolist()
    return {"samples": len(seen), "different": len(set(seen.tolist())), "left": left, "right": right}


WAYS: dict[str, Callable[[Words], Epoch]] = {"ddpexp": ddpexp, "gather": gather, "loader": loader, "tensors": tensors}

if __name__ == "__main__":
    main()
