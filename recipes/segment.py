"""A class for every pixel: a U-Net, images with masks from folders, and intersection over union.

`python -m ddpexp.recipes.segment FOLDER` draws images with masks to try it with.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from ddpexp.data.cache import cache_name, make_cache
from ddpexp.data.datasets import Splits
from ddpexp.data.open_image import open_image
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError

if TYPE_CHECKING:
    from ddpexp.loggers.base import Logger
    from ddpexp.task import EvalSums

IGNORED = 255  # in a mask: a pixel that does not count
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
_SETS = {"train": "train", "val": "eval", "valid": "eval", "validation": "eval", "test": "test"}
_COLORS = 37  # degrees of hue from one class to the next in pictures
_SHOWN = 4  # images of a picture

Sample = tuple[Image.Image, Image.Image]


class Double(nn.Sequential):
    """Two convolutions with normalization. Shapes: (batch, before, height, width) -> (batch, after, height, width)."""

    def __init__(self, before: int, after: int) -> None:
        """Build it."""
        layers: list[nn.Module] = []
        for channels in (before, after):
            layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Down to a coarse grid and up again, with what each size knew added on the way up.

    Source: Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image segmentation", 2015.
    """

    def __init__(self, num_classes: int, width: int = 16, depth: int = 3, channels: int = 3) -> None:
        """Build it with `width` channels at full size and twice as many after each of `depth` halvings."""
        super().__init__()
        counts = [width * 2**level for level in range(depth + 1)]
        self.first = Double(channels, width)
        pairs = list(pairwise(counts))
        self.down = nn.ModuleList(Double(before, after) for before, after in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(after, before, 2, 2) for before, after in reversed(pairs))
        self.merge = nn.ModuleList(Double(2 * before, before) for before, _ in reversed(pairs))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each pixel, for sides of any length.

        Shapes: (batch, channels, height, width) -> (batch, num_classes, height, width).
        """
        height, width = images.shape[2:]
        step = 2 ** len(self.down)
        x = self.first(functional.pad(images, (0, -width % step, 0, -height % step)))
        kept = []
        for block in self.down:
            kept.append(x)
            x = block(functional.max_pool2d(x, 2))
        for rise, block in zip(self.up, self.merge, strict=True):
            x = block(torch.cat((kept.pop(), rise(x)), 1))
        return self.head(x)[:, :, :height, :width]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Segment:
    """Cross entropy and a soft Dice loss in equal parts or others; pixels that are 255 in a mask do not count.

    Source: Milletari, Navab and Ahmadi, "V-Net", 2016.
    """

    num_classes: int
    dice: float = 0.5

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.dice <= 1:
            raise ValueError(f"task.dice={self.dice} is the share of the Dice loss: use 0 to 1")

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> EvalSums:
        """Return sums over images. Shapes: images (batch, channels, height, width), masks (batch, height, width)."""
        images, masks = batch
        scores = model(images).float()
        counts = (masks != IGNORED).flatten(1)
        flat = scores.flatten(2).transpose(1, 2).flatten(0, 1)  # (N, C): of images CUDA has no deterministic kernel
        entropies = functional.cross_entropy(flat, masks.flatten(), ignore_index=IGNORED, reduction="none")
        # Images count alike, whatever is ignored in them.
        loss = entropies.view_as(counts).sum(1) / counts.sum(1).clamp(min=1)
        if self.dice:
            loss = (1 - self.dice) * loss + self.dice * self._dice_loss(scores, masks, counts)
        guesses = scores.argmax(1).flatten(1)
        right = ((guesses == masks.flatten(1)) & counts).sum(1) / counts.sum(1).clamp(min=1)
        metrics: dict[str, Any] = {"pixel_accuracy": (right.sum(), len(images))}
        if not model.training:
            places = (masks.flatten(1) * self.num_classes + guesses)[counts]
            metrics["confusion"] = torch.bincount(places, minlength=self.num_classes**2)
        return loss.sum(), len(images), metrics

    def _dice_loss(self, scores: Tensor, masks: Tensor, counts: Tensor) -> Tensor:
        """Return the loss of each image, over the classes in its mask. Shapes: counts (batch, pixels) -> (batch,)."""
        probability = scores.softmax(1).flatten(2) * counts[:, None]
        wanted = functional.one_hot(masks.where(masks != IGNORED, 0).flatten(1), self.num_classes).permute(0, 2, 1)
        wanted = wanted * counts[:, None]
        shared, both = (probability * wanted).sum(2), (probability + wanted).sum(2)
        there = wanted.sum(2) > 0
        missed = (1 - (2 * shared + 1) / (both + 1)) * there
        return missed.sum(1) / there.sum(1).clamp(min=1)

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the intersection over union of each class, and the mean over the classes that there are."""
        table = sums["confusion"].view(self.num_classes, self.num_classes).double()
        union = table.sum(0) + table.sum(1) - table.diag()
        iou = torch.where(union > 0, table.diag() / union.clamp(min=1), torch.nan)
        found = {f"iou/{number}": float(value) for number, value in enumerate(iou) if not value.isnan()}
        return {"mean_iou": float(iou.nanmean()), **found}

    def predict(self, model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the class of each pixel. Shapes: (batch, height, width) uint8, int64 above 256 classes."""
        classes = model(batch[0]).argmax(1)
        return {"mask": classes.to(torch.uint8) if self.num_classes <= 256 else classes}

    def on_eval(self, model: nn.Module, batch: tuple[Tensor, Tensor], logger: Logger, step: int) -> None:
        """Show the first images above their masks and above what the model finds."""
        images, masks = (one[:_SHOWN] for one in batch)
        found = model(images).argmax(1)
        mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in (_MEAN, _STD))
        pixels = ((images.float().cpu() * std + mean).clamp(0, 1) * 255).to(torch.uint8).permute(0, 2, 3, 1)
        rows = (pixels, *(_colored(one.cpu()) for one in (masks, found)))
        logger.image("masks", torch.cat([row.permute(1, 0, 2, 3).flatten(1, 2) for row in rows]), step)


def _colored(masks: Tensor) -> Tensor:
    """Return masks in colors, class 0 black and ignored pixels white. Shapes: (...) -> (..., 3) uint8."""
    hues = (torch.arange(256) * _COLORS % 256).to(torch.uint8)
    table = torch.stack([hues, torch.full_like(hues, 200), torch.full_like(hues, 255)], 1)
    colors = np.array(Image.fromarray(table[None].numpy(), "HSV").convert("RGB"))[0]
    colors[0], colors[IGNORED] = 0, 255
    return torch.from_numpy(colors)[masks.clamp(max=IGNORED)]


class Pairs(Dataset[Sample]):
    """Images with their masks, as they are in the files."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Take the paths of images and masks."""
        self.pairs = pairs

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        """Read an image, in RGB, and its mask."""
        image, mask = map(open_image, self.pairs[index])
        return image.convert("RGB"), mask


def prepare(root: str | None, num_classes: int | None = None) -> dict[str, Any]:
    """Match images with masks and read every mask once; return a description of the data.

    The fact is `num_classes`. Raises: RefusedError.
    """
    if not root:
        raise RefusedError(
            "is not set", key="data.root", suggestion="Name the folder with train/images and train/masks."
        )
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    sets = _sets(folder)
    identity = {name: [[*pair, *_stamps(pair)] for pair in pairs] for name, pairs in sets.items()}

    def fill(_: Path) -> Mapping[str, Any]:
        return {"largest": max(_largest(*pair) for pairs in sets.values() for pair in pairs)}

    files = [file for pairs in sets.values() for pair in pairs for file in pair]
    record = make_cache([folder, user_cache()], cache_name("masks", identity), fill, "little", sources=files).record
    needed = int(record["largest"]) + 1
    if num_classes is not None and num_classes < needed:
        raise RefusedError(
            f"A mask in data.root={folder} holds the class {needed - 1}",
            key="data.num_classes",
            value=num_classes,
            suggestion=f"Use data.num_classes={needed} or more, or 255 for pixels that do not count.",
        )
    counts = {name: len(pairs) for name, pairs in sets.items()}
    return {
        "name": "masks",
        "hash": hashlib.sha256(repr(identity).encode()).hexdigest(),
        "num_train": counts["train"],
        "num_test": counts.get("eval", 0),
        "note": f"{counts['train']:,} + {counts.get('eval', 0):,} images with masks, from {folder}",
        "root": str(folder),
        "facts": {"num_classes": num_classes or max(needed, 2)},
    }


def load(prepared: Mapping[str, Any]) -> Splits:
    """Return the sets that `prepare` has found."""
    sets = {name: Pairs(pairs) for name, pairs in _sets(Path(prepared["root"])).items()}
    return Splits(train=sets.pop("train"), evals=sets)


def _sets(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the images with their masks of each set. Raises: RefusedError."""
    if (folder / "images").is_dir():
        return {"train": _pairs(folder)}
    found = {_SETS[name]: _pairs(folder / name) for name in _SETS if (folder / name / "images").is_dir()}
    if "train" not in found:
        raise RefusedError(
            "has no train/images" if folder.is_dir() else "is not a folder",
            key="data.root",
            value=folder,
            suggestion="Images belong into train/images and val/images and their masks into train/masks and "
            "val/masks, or all into images and masks with data.validation_fraction.",
        )
    return found


def _pairs(folder: Path) -> list[tuple[str, str]]:
    images, masks = ({path.stem: str(path) for path in _files(folder / part)} for part in ("images", "masks"))
    if not images:
        raise RefusedError(f"holds no images: files of {', '.join(_ENDINGS)} are read", place=folder / "images")
    if lacking := sorted(images.keys() - masks.keys()):
        names = ", ".join(lacking[:3]) + (" and more" if lacking[3:] else "")
        raise RefusedError(
            f"has no mask for {names}",
            place=folder / "masks",
            suggestion=f"Give a mask the name of its image, such as masks/{lacking[0]}.png.",
        )
    return [(images[name], masks[name]) for name in sorted(images)]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in _ENDINGS) if folder.is_dir() else []


def _stamps(pair: Sequence[str]) -> list[int]:
    try:
        return [value for path in pair for status in [os.stat(path)] for value in (status.st_size, status.st_mtime_ns)]
    except OSError as error:
        raise RefusedError(
            f"cannot be read ({error.strerror})", place=error.filename, suggestion="Replace it or remove it."
        ) from None


def _largest(image: str, mask: str) -> int:
    """Return the largest class of a mask. Raises: RefusedError, if it is no mask of the image."""
    try:
        with open_image(image) as opened, open_image(mask) as found:
            sizes, mode = (opened.size, found.size), found.mode
            values = np.asarray(found)
    except Exception as error:  # decoders raise errors of many kinds
        raise RefusedError(
            f"cannot be read ({error})", place=f"{image} or {mask}", suggestion="Replace it or leave it out."
        ) from None
    if mode not in ("L", "P", "1", "I;16", "I"):
        raise RefusedError(
            f"is an image of mode {mode}",
            place=mask,
            suggestion="Store a mask with one number per pixel, its class, as a grey or palette PNG.",
        )
    if sizes[0] != sizes[1]:
        raise RefusedError(
            f"has {sizes[1]} pixels and its image {sizes[0]}", place=mask, suggestion="Make them the same."
        )
    counted = values[values != IGNORED]
    return int(counted.max()) if counted.size else 0


def train_view(sample: Sample, size: int, scale: Sequence[float] = (0.5, 2.0)) -> tuple[Tensor, Tensor]:
    """Resize both at random, crop a square of `size` pixels, and flip half of them. Shapes: as in `eval_view`.

    The generators are seeded by sample and epoch.
    """
    factor = float(torch.empty(()).uniform_(*scale)) * size / min(sample[0].size)
    image, mask = _resized(sample, max(size, round(min(sample[0].size) * factor)))
    left, top = (int(torch.randint(side - size + 1, ())) for side in image.size)
    box = left, top, left + size, top + size
    image, mask = image.crop(box), mask.crop(box)
    if torch.rand(()) < 0.5:
        image, mask = (one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for one in (image, mask))
    return _tensors(image, mask)


def eval_view(sample: Sample, size: int) -> tuple[Tensor, Tensor]:
    """Resize the shortest side to `size` and cut out the middle.

    Shapes: image (3, size, size) float32, normalized; mask (size, size) int64.
    """
    image, mask = _resized(sample, size)
    left, top = ((side - size) // 2 for side in image.size)
    box = left, top, left + size, top + size
    return _tensors(image.crop(box), mask.crop(box))


def _resized(sample: Sample, shortest: int) -> Sample:
    image, mask = sample
    factor = shortest / min(image.size)
    width, height = (max(shortest, round(side * factor)) for side in image.size)
    return (
        image.resize((width, height), Image.Resampling.BILINEAR),
        mask.resize((width, height), Image.Resampling.NEAREST),
    )


def _tensors(image: Image.Image, mask: Image.Image) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (_MEAN, _STD))
    return (pixels - mean) / std, torch.from_numpy(np.array(mask, dtype=np.int64))


def draw(folder: Path, train: int = 160, val: int = 40, side: int = 96) -> None:
    """Draw images of discs (class 1) and boxes (class 2) on a noisy ground (class 0), with their masks."""
    numbers = np.random.default_rng(0)
    for name, count in (("train", train), ("val", val)):
        for part in ("images", "masks"):
            (folder / name / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            ground = numbers.integers(40, 120, 3) + numbers.normal(0, 25, (side, side, 3))
            image = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
            mask = Image.new("L", (side, side))
            for kind in numbers.integers(1, 3, 3).tolist():
                x, y, reach = numbers.integers(0, side - 16), numbers.integers(0, side - 16), numbers.integers(16, 40)
                color = tuple(numbers.integers(100, 256, 3).tolist())
                for picture, fill in ((image, color), (mask, kind)):
                    pen = ImageDraw.Draw(picture)
                    (pen.ellipse if kind == 1 else pen.rectangle)(
                        [int(x), int(y), int(x + reach), int(y + reach)], fill
                    )
            image.save(folder / name / f"images/{number:03d}.png")
            mask.save(folder / name / f"masks/{number:03d}.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]))
