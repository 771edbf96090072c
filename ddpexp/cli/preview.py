"""A sheet of the first training images of a run, as the model will see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.system.files import write_data
from ddpexp.train.build import load_data
from ddpexp.train.choose_samples import arrange

_IMAGES, _COLUMNS = 32, 8
_TEXT = 14  # height of a line below an image
_SMALLEST = 96  # width of an image on the sheet, at least


def draw(experiment: Experiment, prepared: Mapping[str, Any] | None, file: Path) -> None:
    """Draw the sheet.

    Raises:
        RefusedError: a batch does not begin with images. OSError: the file cannot be written.
    """
    world = World.alone()
    splits = arrange(load_data(experiment, prepared, world), experiment, world)
    trainer = experiment.trainer
    plan = plan_batches(trainer.global_batch_size, "auto", 1)
    batches = TrainBatches(splits.train, plan, 0, trainer.seed, world.device, order=splits.order)
    batch, *_ = next(batches.steps(0, 1))
    images = batch[0] if isinstance(batch, tuple | list) and batch else None
    if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] not in (1, 3):
        raise RefusedError("draws images, and the batches of this data do not begin with any", place="--preview")
    facts = (prepared or {}).get("facts") or {}
    labels = texts(batch[1], facts.get("classes")) if len(batch) > 1 else [""] * len(images)
    mean, std = (tuple((prepared or {}).get(key) or ()) for key in ("mean", "std"))
    picture = sheet(pixels(images[:_IMAGES], mean, std), labels[:_IMAGES])
    content = BytesIO()
    picture.save(content, "PNG")
    write_data(file, content.getvalue())


def pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray[Any, Any]:
    """Undo the normalization; where it is not known, the darkest value is black and the brightest white.

    Shapes: (batch, channels, height, width) float to (batch, height, width, channels) uint8.
    """
    if mean and std:
        images = images * torch.tensor(std).view(1, -1, 1, 1) + torch.tensor(mean).view(1, -1, 1, 1)
    else:
        low, high = images.amin(), images.amax()
        images = (images.float() - low) / (high - low).clamp(min=1e-6)
    return (images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def texts(labels: Any, classes: Sequence[str] | None) -> list[str]:
    """Return the names of labels; of probabilities, those of the two most probable classes with their shares."""
    if not isinstance(labels, Tensor) or labels.dim() not in (1, 2):
        return [""] * len(labels)

    def name(number: int) -> str:
        return str(classes[number]) if classes is not None and 0 <= number < len(classes) else str(number)

    if labels.dim() == 1:
        return [name(int(label)) for label in labels.tolist()]
    shares, order = labels.sort(1, descending=True)
    return [
        ", ".join(f"{name(int(place))} {share:.0%}" for place, share in zip(*pair, strict=True) if share > 0)
        for pair in zip(order[:, :2].tolist(), shares[:, :2].tolist(), strict=True)
    ]


def sheet(images: np.ndarray[Any, Any], labels: Sequence[str]) -> Image.Image:
    """Arrange images in rows, each with its label below. Shapes: (number, height, width, channels) uint8."""
    scale = max(1, -(-_SMALLEST // images.shape[2]))
    width, height = images.shape[2] * scale, images.shape[1] * scale
    rows = -(-len(images) // _COLUMNS)
    picture = Image.new("RGB", (min(len(images), _COLUMNS) * width, rows * (height + _TEXT)), "white")
    pen = ImageDraw.Draw(picture)
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        left, top = place % _COLUMNS * width, place // _COLUMNS * (height + _TEXT)
        tile = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
        picture.paste(tile.resize((width, height), Image.Resampling.NEAREST), (left, top))
        pen.text((left + 2, top + height + 1), label[: width // 6], fill="black")
    return picture
