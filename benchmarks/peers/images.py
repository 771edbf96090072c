"""Batches of photographs, cropped, flipped and normalized, from ddpexp, from a loop by hand and from a DataLoader.

`--way ddpexp|gather|loader --folder PHOTOS`; prints JSON: `first` is the first epoch in seconds, with
all preparation and the start of workers, `rate` the samples a second of the fastest of the epochs after it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.image_folder.dataset import load
from ddpexp.data.image_folder.prepare import prepare

_BATCH, _EPOCHS, _SIZE = 64, 3, 224
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    """Read a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["ddpexp", "gather", "loader"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cache", default="raw")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--changes", action="store_true")
    parser.add_argument("--augment-on", default="host")
    parser.add_argument("--epochs", type=int, default=_EPOCHS)
    words = parser.parse_args()
    begin = time.perf_counter()
    epochs = {"ddpexp": ours, "gather": by_hand, "loader": loader}[words.way](words)
    samples = _consume(next(epochs))
    found = {"first": time.perf_counter() - begin, "samples": float(samples)}
    seconds = []
    for _ in range(words.epochs - 1):
        begin = time.perf_counter()
        _consume(next(epochs))
        seconds.append(time.perf_counter() - begin)
    found["rate"] = samples / min(seconds)
    if words.way == "ddpexp":
        found["seek"] = seek(words)
    print(json.dumps(found))


def _consume(batches: Iterator[Any]) -> int:
    number = 0
    for images, labels in batches:
        assert images.shape == (_BATCH, 3, _SIZE, _SIZE)
        assert images.dtype == torch.float32
        number += len(labels)
    return number


def _prepared(words: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "rand_augment": 2} if words.changes else {}
    return prepare(str(words.folder), cache=words.cache, augment_on=words.augment_on, **changes)


def _batches(words: Any) -> TrainBatches:
    return TrainBatches(load(_prepared(words)).train, plan_batches(_BATCH, "auto", 1), 0, 0, torch.device("cpu"))


def ours(words: Any) -> Iterator[Iterator[Any]]:
    """Yield epochs as a training run reads them."""
    batches = _batches(words)
    for epoch in range(words.epochs):
        first = epoch * batches.steps_per_epoch
        yield (parts[0] for parts in batches.steps(first, first + batches.steps_per_epoch))


def seek(words: Any) -> float:
    """Return how long it takes until the indices at 80 % of an epoch are there. Units: seconds."""
    batches = _batches(words)
    begin = time.perf_counter()
    next(batches.indices(int(0.8 * batches.steps_per_epoch), batches.steps_per_epoch))
    return time.perf_counter() - begin


def by_hand(words: Any) -> Iterator[Iterator[Any]]:
    """Yield epochs read from the cache of ddpexp by a loop as one would write it."""
    prepared = _prepared(words)
    folder = Path(prepared["folder"])
    content = np.asarray(np.memmap(folder / "train.bin", np.uint8, "r"))
    table, labels = np.load(folder / "train-index.npy"), torch.from_numpy(np.load(folder / "train-labels.npy"))
    dice, threads = np.random.default_rng(0), ThreadPoolExecutor(torch.get_num_threads())
    norm = [(torch.tensor(-shift / scale), 1 / (255 * scale)) for shift, scale in zip(_MEAN, _STD, strict=True)]

    def one(index: int, box: tuple[int, int, int, int], flip: bool, out: NDArray[np.uint8]) -> None:
        offset, height, width, length = table[index].tolist()
        image = content[offset : offset + length].reshape(height, width, 3)
        top, left, tall, wide = box
        cut = torch.from_numpy(image[top : top + tall, left : left + wide].copy())[None].permute(0, 3, 1, 2)
        resized = functional.interpolate(cut, (_SIZE, _SIZE), mode="bilinear", antialias=True)
        out[:] = (resized.flip(3) if flip else resized)[0].permute(1, 2, 0).numpy()

    def batches() -> Iterator[Any]:
        order = dice.permutation(len(labels))
        for begin in range(0, len(order) - _BATCH + 1, _BATCH):
            indices = order[begin : begin + _BATCH]
            boxes = [_crop(dice, *table[index, 1:3].tolist()) for index in indices]
            pixels = np.empty((_BATCH, _SIZE, _SIZE, 3), np.uint8)  # numpy's memory is in huge pages
            list(threads.map(one, indices, boxes, (dice.random(_BATCH) < 0.5).tolist(), pixels))
            images = torch.from_numpy(np.empty((_BATCH, 3, _SIZE, _SIZE), np.float32))
            images.copy_(torch.from_numpy(pixels).permute(0, 3, 1, 2))
            for channel, (shift, scale) in zip(images.unbind(1), norm, strict=True):
                torch.add(shift, channel, alpha=scale, out=channel)
            yield images, labels[indices]

    for _ in range(words.epochs):
        yield batches()


def _crop(dice: Any, height: int, width: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = height * width * dice.uniform(0.08, 1)
        aspect = np.exp(dice.uniform(np.log(3 / 4), np.log(4 / 3)))
        tall, wide = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
        if 0 < tall <= height and 0 < wide <= width:
            return int(dice.integers(height - tall + 1)), int(dice.integers(width - wide + 1)), tall, wide
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


class _Photos(Dataset[tuple[Tensor, int]]):
    """What torchvision's ImageFolder with RandomResizedCrop, a flip and PILToTensor does."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        self._files = [(path, label) for label, place in enumerate(classes) for path in sorted(place.iterdir())]
        self._dice = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        top, left, tall, wide = _crop(self._dice, image.height, image.width)
        cut = image.resize((_SIZE, _SIZE), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + tall))
        if self._dice.random() < 0.5:
            cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(cut)).permute(2, 0, 1), label


def loader(words: Any) -> Iterator[Iterator[Any]]:
    """Yield epochs of a DataLoader, whose bytes are normalized here: the fastest way to use one."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in (_MEAN, _STD))
    batches = DataLoader(
        _Photos(words.folder), _BATCH, shuffle=True, num_workers=words.workers, drop_last=True,
        persistent_workers=words.workers > 0,
    )  # fmt: skip
    for _ in range(words.epochs):
        yield ((images.float().sub_(mean).div_(std), labels) for images, labels in batches)


if __name__ == "__main__":
    main()
