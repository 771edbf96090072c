"""Images in `.npy` files: checked once, before any worker starts.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ddpexp.data.npy import read_npy_header
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular

_PARTS = ("train", "test")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_MAX_DEPTH = 2  # levels of folders below data.root that are searched for images
_MAX_ENTRIES = 2000  # entries that are looked at
_LABELS = {"|u1": "B", "|i1": "b", "<i2": "h", "<i4": "i", "<i8": "q"}  # with the type codes of `array`
_MAX_CLASSES = 100_000  # larger labels are no classes
_HASHED_BYTES = 1 << 16  # at both ends of a file: enough to distinguish data sets, and fast
_FILES = "train-images.npy, train-labels.npy, test-images.npy and test-labels.npy"


@dataclass(frozen=True)
class _Array:
    """The contents of an `.npy` file, from its header."""

    kind: str
    shape: tuple[int, ...]
    digest: str


def prepare(
    root: str | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    flip: bool = False,
    crop: int = 0,
    alternate: bool = False,
    reflect: bool = False,
) -> dict[str, Any]:
    """Check that the four files exist and fit together; return a description of the data.

    The result is JSON: name, folder (absolute), hash (of the sizes and both ends of the files), num_train,
    num_test, note, the options, and facts (which a configuration may refer to).

    Raises: RefusedError, if a file or an option is invalid.
    """
    if not root:
        raise RefusedError("is not set", key="data.root", suggestion=f"Name the folder with {_FILES}.")
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    if not any((folder / f"{part}-{what}.npy").exists() for part in _PARTS for what in ("images", "labels")):
        raise RefusedError(
            f"{_instead(folder)}: data=images reads {_FILES} there",
            key="data.root",
            value=folder,
            suggestion="Store the images as such arrays with numpy.save, or read folders of JPEG, PNG or WebP images, "
            "one for each class, with data=image_folder.",
        )
    found = {(part, what): _read(folder / f"{part}-{what}.npy") for part in _PARTS for what in ("images", "labels")}
    for part in _PARTS:
        _check_no_images(folder, part, found[part, "images"], found[part, "labels"])
    shape = found["train", "images"].shape
    if found["test", "images"].shape[1:] != shape[1:]:
        sizes = f"{_spoken(shape[1:])} and {_spoken(found['test', 'images'].shape[1:])}"
        reason = f"holds images of two sizes to train and to test on, {sizes}"
        raise RefusedError(reason, key="data.root", value=folder, suggestion="Make all images the same size.")
    _check_options(mean, std, crop, reflect, shape)
    num_train, num_test = shape[0], found["test", "images"].shape[0]
    return {
        "name": "images",
        "folder": str(folder),
        "hash": hashlib.sha256("\n".join(one.digest for one in found.values()).encode()).hexdigest(),
        "num_train": num_train,
        "num_test": num_test,
        "note": f"{num_train:,} + {num_test:,} images of {_spoken(shape[1:])}, from files in {folder}",
        "mean": list(mean),
        "std": list(std),
        "flip": flip,
        "crop": crop,
        "alternate": alternate,
        "reflect": reflect,
        "facts": {
            **_classes(folder),
            "shape": [1, *shape[1:]] if len(shape) == 3 else list(shape[1:]),
            "mean": list(mean),
            "std": list(std),
        },
    }


def _instead(folder: Path) -> str:
    """Return what a folder without the expected files contains."""
    if not folder.is_dir():
        return "is not a folder" if folder.exists() else "does not exist"
    if (images := found_images(folder)) is not None:
        return f"holds {images}"
    names = sorted(path.name for path in islice(folder.iterdir(), _MAX_ENTRIES))
    return f"holds {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}" if names else "is empty"


def found_images(folder: Path) -> str | None:
    """Describe the image files in a folder or its subfolders; None if there are none."""
    for depth in range(_MAX_DEPTH + 1):
        for path in islice(folder.glob("/".join("*" * depth) + "/*" if depth else "*"), _MAX_ENTRIES):
            if path.suffix.lower() in _IMAGES:
                place = path.relative_to(folder)
                return f"images such as {place}" if depth == 0 else f"folders of images such as {place}"
    return None


def _check_no_images(folder: Path, part: str, images: _Array, labels: _Array) -> None:
    if images.kind != "|u1" or len(images.shape) not in (3, 4) or 0 in images.shape:
        raise RefusedError(
            f"holds {images.kind} of shape {_spoken(images.shape)}",
            suggestion="Store bytes (uint8) of shape samples x channels x height x width, or samples x height x width "
            "for one channel.",
            place=f"{folder}/{part}-images.npy",
        )
    if labels.kind not in _LABELS or labels.shape != images.shape[:1]:
        raise RefusedError(
            f"holds {labels.kind} of shape {_spoken(labels.shape)}, and there are {images.shape[0]:,} images",
            suggestion="Store one whole number for each image.",
            place=f"{folder}/{part}-labels.npy",
        )


def _check_options(
    mean: tuple[float, ...], std: tuple[float, ...], crop: int, reflect: bool, shape: tuple[int, ...]
) -> None:
    check_norm(mean, std, (1, shape[1] if len(shape) == 4 else 1))
    if len(mean) != len(std):
        raise RefusedError(
            f"and data.std={list(std)} differ in length",
            key="data.mean",
            value=list(mean),
            suggestion="Use one number for each channel in both.",
        )
    if not 0 <= crop <= min(shape[-2:]):
        raise RefusedError(
            f"does not fit images of {_spoken(shape[1:])}",
            key="data.crop",
            value=crop,
            suggestion=f"Use 0 to {min(shape[-2:])}.",
        )
    if reflect and crop >= min(shape[-2:]):
        raise RefusedError(
            f"can pad images of {_spoken(shape[1:])} with at most {min(shape[-2:]) - 1} pixels",
            key="data.reflect",
            value=True,
            suggestion=f"Use data.crop={min(shape[-2:]) - 1} or less.",
        )


def check_norm(mean: Sequence[float], std: Sequence[float], lengths: Sequence[int]) -> None:
    """Check mean and standard deviation of images, which have one of these lengths. Raises: RefusedError."""
    for key, values in (("data.mean", mean), ("data.std", std)):
        if len(values) not in lengths:
            raise RefusedError(
                f"has {len(values)} numbers",
                key=key,
                value=list(values),
                suggestion="Use one number for each channel, or one for all.",
            )
    if not all(value > 0 for value in std):
        raise RefusedError("divides the images", key="data.std", value=list(std), suggestion="Use numbers above 0.")


def _read(path: Path) -> _Array:
    """Read the header of an `.npy` file, and check that it is complete: a missing page would kill a worker."""
    try:
        with open_regular(path) as file:
            kind, shape, begin = read_npy_header(file)
            expected = begin + math.prod(shape) * int(kind[2:])
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.sha256(f"{size}\n".encode() + file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            digest.update(file.read())
    except OSError as error:
        raise RefusedError(
            f"cannot be read ({error.strerror})", suggestion="Set data.root to the folder with it.", place=path
        ) from None
    except (ValueError, KeyError, TypeError, SyntaxError, struct.error):
        raise RefusedError(
            "is not a .npy file of numbers in C order", suggestion="Store it with numpy.save.", place=path
        ) from None
    if size != expected:
        raise RefusedError(
            f"has {size:,} bytes, but its header says {expected:,}: it is damaged",
            suggestion="Store it again.",
            place=path,
        )
    return _Array(kind, shape, digest.hexdigest())


def _classes(folder: Path) -> dict[str, Any]:
    """Return the number of classes, which is that of the largest label and one, and their names."""
    largest = max(_largest(folder / f"{part}-labels.npy") for part in _PARTS)
    if not 0 <= largest < _MAX_CLASSES:
        return {}
    return {"num_classes": largest + 1, "classes": [str(label) for label in range(largest + 1)]}


def _largest(path: Path) -> int:
    """Return the largest number in a checked `.npy` file of labels."""
    with open_regular(path) as file:
        kind, (count,), _ = read_npy_header(file)
        labels = array(_LABELS[kind])
        labels.fromfile(file, count)
    return max(labels)


def _spoken(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"
