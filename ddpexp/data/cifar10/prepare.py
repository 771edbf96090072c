"""Preparing CIFAR-10: found or downloaded, and decoded once into memory-mappable `.npy` files.

The rules are those of `ddpexp.data.mnist.prepare`: a wrong archive is always refused; `auto` falls back to drawn
pictures, with a warning, only if there is no archive and it cannot be downloaded.

Standard library only but for what decodes or draws, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ddpexp.data.cache import CACHES, Cache, in_first, read_cache, update_cache, write_cache
from ddpexp.data.cifar10 import archive as archives
from ddpexp.data.cifar10.archive import SHAPE, Part
from ddpexp.data.cifar10.classes import CLASSES, KINDS
from ddpexp.data.folders import Stamp, bases_of, data_folder, joint_hash, store, to_stderr, unchanged
from ddpexp.data.mirrors import DownloadError, Patience, WrongError, alone, download_unless_failed
from ddpexp.data.npy import write_npy
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
SOURCES = ("auto", "files", "download", "embedded")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pictures, as fractions of 255
AUTO_PATIENCE = Patience(first=5.0, stall=10.0, total=900.0)
DOWNLOAD_PATIENCE = Patience(first=60.0, stall=30.0, total=3600.0)
EMBEDDED_VERSION = 1  # increase it when synthetic.py changes: it is part of the name of caches
EMBEDDED_SEEDS = (1, 2)  # of the pictures to train on and to test with
EMBEDDED_MOST = 200_000  # pictures per part: they are drawn in memory
_FAILURE = "download-failed-cifar10"  # the note of a failed download, in the user's cache
_SPACE = "about 400 MB"
_MOMENTS_OF = 5000  # pictures whose patches are counted
_PATCH = 2  # its side


def prepare(
    root: str | None,
    source: Literal["auto", "files", "download", "embedded"],
    flip: bool = False,
    alternate: bool = False,
    crop: int = 0,
    reflect: bool = False,
    embedded_train: int = 50_000,
    embedded_test: int = 10_000,
    *,
    warn: Callable[[str], None] | None = None,
    mirrors: Sequence[str] = MIRRORS,
    patience: Patience | None = None,
) -> dict[str, Any]:
    """Make sure that a decoded cache exists; return a description of the data.

    Arguments are as those of `ddpexp.data.mnist.prepare.prepare`, and the result is that of
    `ddpexp.data.images.files.prepare`, with a fact `patch_moments` (see `patch_moments`).

    Raises: RefusedError, if the data or an option is invalid.
    """
    if source not in SOURCES:
        raise RefusedError(
            "is not a source of data", key="data.source", value=source, suggestion=f"Use one of {', '.join(SOURCES)}."
        )
    for key, num in (("data.embedded_train", embedded_train), ("data.embedded_test", embedded_test)):
        if not 1 <= num <= EMBEDDED_MOST:
            raise RefusedError(
                "is not a valid number of pictures", key=key, value=num, suggestion=f"Use 1 to {EMBEDDED_MOST}."
            )
    if not 0 <= crop < SHAPE[1]:
        raise RefusedError(
            "does not fit images of 3 x 32 x 32", key="data.crop", value=crop, suggestion=f"Use 0 to {SHAPE[1] - 1}."
        )
    augment = {"flip": flip, "alternate": alternate, "crop": crop, "reflect": reflect}
    if source == "embedded":
        return _embedded(embedded_train, embedded_test) | augment
    folder = data_folder(root, "cifar-10-python.tar.gz", source)
    patience = patience or (AUTO_PATIENCE if source == "auto" else DOWNLOAD_PATIENCE)
    try:
        return _cifar10(folder, source, mirrors, patience) | augment
    except DownloadError as error:
        if source == "download":
            raise RefusedError(
                f"CIFAR-10 could not be downloaded ({error}), so there is nothing to train on",
                suggestion=f"Put {archives.ARCHIVE.remote_name} into data.root={folder}, or check the "
                "network, or set data.source=embedded for drawn pictures.",
            ) from None
        (warn or to_stderr)(
            f"THIS IS NOT CIFAR-10: data.root={folder} does not hold {archives.ARCHIVE.remote_name} and it could not "
            f"be downloaded ({error}), so {embedded_train:,} + {embedded_test:,} drawn pictures stand in and no "
            "accuracy is comparable with CIFAR-10; for the real data put the archive into that folder or set "
            "data.source=download, and set data.source=embedded if drawn pictures are what you want"
        )
        return _embedded(embedded_train, embedded_test) | augment


def _cifar10(root: Path, source: str, mirrors: Sequence[str], patience: Patience) -> dict[str, Any]:
    """Get CIFAR-10 from the cache, the archive or the network, in this order.

    Raises: DownloadError, if there is no archive and it could not be downloaded.
    """
    identity = _local(root, source)
    if identity is None:
        with alone(patience.total):
            identity = _local(root, source) or _fetched(root, source, mirrors, patience)
    return identity


def _local(root: Path, source: str) -> dict[str, Any] | None:
    """Get CIFAR-10 from the cache or the archive; None if it must be downloaded."""
    bases = bases_of(root)
    caches = _caches(bases)
    for cache in caches:
        if cache.record.get("root") == str(root) and unchanged(cache.record):
            return _cifar10_identity(cache, source)
    path = _find(bases if source != "files" else [root])
    if path is not None:
        return _decoded(root, source, "files", *_load(path))
    if source == "files":
        raise RefusedError(
            f"does not hold {archives.ARCHIVE.remote_name}, and training needs it",
            key="data.root",
            value=root,
            suggestion="Put it there, or set data.source=download to fetch it.",
        )
    return _cifar10_identity(caches[0], source) if caches else None


def _find(bases: Sequence[Path]) -> Path | None:
    """Find the archive in the folders."""
    for path in (base / archives.ARCHIVE.remote_name for base in bases):
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise RefusedError(
                f"cannot be accessed ({error.strerror})", suggestion="Make it readable or move it away.", place=path
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(
                "has the name of a data file, but is not a regular file", suggestion="Move it away.", place=path
            )
        return path
    return None


def _load(path: Path) -> tuple[bytes, Stamp]:
    """Read the archive, whole and checked."""
    try:
        with open_regular(path) as stream:
            stamp = Stamp.of(str(path), os.fstat(stream.fileno()))
            return archives.ARCHIVE.read(stream), stamp
    except WrongError as error:
        raise RefusedError(
            f"{error}, and training on it would not be training on CIFAR-10",
            suggestion=f"Replace it with the original {archives.ARCHIVE.remote_name}, or delete it and set "
            "data.source=download.",
            place=path,
        ) from None
    except OSError as error:
        raise RefusedError(
            f"cannot be read ({error.strerror})", suggestion="Make it readable or replace it.", place=path
        ) from None


def _fetched(root: Path, source: str, mirrors: Sequence[str], patience: Patience) -> dict[str, Any]:
    """Download the archive. Raises: DownloadError."""
    [(content, _)] = download_unless_failed([archives.ARCHIVE], mirrors, patience, source == "download", _FAILURE)
    stamp = in_first(bases_of(root), functools.partial(store, archives.ARCHIVE.remote_name, content), _SPACE)
    return _decoded(root, source, "download", content, stamp)


def _decoded(root: Path, source: str, way: str, content: bytes, stamp: Stamp) -> dict[str, Any]:
    """Write what the checked archive holds to a cache, unless one contains it already."""
    record = {
        "name": "cifar10",
        "source": way,
        "sha256": archives.ARCHIVE.sha256,
        "root": str(root),
        "stamps": [vars(stamp)],
    }
    bases = bases_of(root)
    if caches := _caches(bases):
        return _cifar10_identity(update_cache(caches[0], record), source)
    try:
        train, test = archives.unpack(archives.ARCHIVE, content)
    except WrongError as error:
        suggestion = f"Replace it with the original {archives.ARCHIVE.remote_name}."
        raise RefusedError(str(error), suggestion=suggestion, place=stamp.path) from None
    return _cifar10_identity(
        in_first(bases, lambda base: _write(base, _cache_name(), train, test, record), _SPACE), source
    )


def _write(base: Path, name: str, train: Part, test: Part, record: Mapping[str, Any]) -> Cache:
    """Write the arrays of both parts to a cache. Raises: OSError."""

    def fill(folder: Path) -> None:
        for part, content in (("train", train), ("test", test)):
            write_npy(folder / f"{part}-images.npy", (len(content.labels), *SHAPE), content.pixels)
            write_npy(folder / f"{part}-labels.npy", (len(content.labels),), content.labels)

    counts = {"num_train": len(train.labels), "num_test": len(test.labels)}
    return write_cache(base, name, fill, {**record, **counts, "patch_moments": patch_moments(train.pixels)})


def patch_moments(pixels: bytes) -> list[list[float]]:
    """Return the mean products of the values of a patch of 2 x 2, over the first 5,000 normalized pictures.

    Sums of products of bytes are exact, so the result is the same on every machine. Shapes: (12, 12), in the order of a
    convolution's weights: channel, row, column.
    """
    import numpy as np  # late: the command does not need it otherwise

    pictures = np.frombuffer(pixels, np.uint8).reshape(-1, *SHAPE)[:_MOMENTS_OF]
    width = SHAPE[1] - _PATCH + 1
    columns = [
        pictures[:, channel, top : top + width, left : left + width].reshape(-1)
        for channel in range(SHAPE[0])
        for top in range(_PATCH)
        for left in range(_PATCH)
    ]
    patches = np.stack(columns).astype(np.float64)  # whole numbers, whose sums of products stay below 2 ** 53
    num = patches.shape[1]
    products, means = patches @ patches.T / num, patches.sum(1) / num
    shift, scale = (np.repeat(np.array(values), _PATCH**2) for values in (MEAN, STD))
    mixed = np.outer(means, shift) / 255
    normalized = (products / 255**2 - mixed - mixed.T + np.outer(shift, shift)) / np.outer(scale, scale)
    return [[round(float(value), 6) for value in row] for row in normalized]


def _caches(bases: Sequence[Path]) -> list[Cache]:
    return [cache for base in bases if (cache := read_cache(base / CACHES / _cache_name()))]


def _cache_name() -> str:
    return f"cifar10-{archives.ARCHIVE.sha256[:12]}"


def _cifar10_identity(cache: Cache, source: str) -> dict[str, Any]:
    origin = "files" if source == "files" else cache.record["source"]
    folder = os.path.dirname(cache.record["stamps"][0]["path"])
    way = "from the archive in" if origin == "files" else "downloaded to"
    return _identity(cache, origin, f"{way} {folder}", "CIFAR-10", CLASSES)


def _embedded(num_train: int, num_test: int) -> dict[str, Any]:
    """Get the drawn pictures from the cache, or draw them."""
    name = f"embedded-cifar10-v{EMBEDDED_VERSION}-{num_train}-{num_test}"
    base = user_cache()
    cache = read_cache(base / CACHES / name)
    if cache is None:
        from ddpexp.data.cifar10 import synthetic  # late: it imports numpy, which the command does not need otherwise

        drawn = [synthetic.draw(num, seed) for num, seed in zip((num_train, num_test), EMBEDDED_SEEDS, strict=True)]
        train, test = (Part(images.tobytes(), labels.tobytes()) for images, labels in drawn)
        parts = (train.pixels, train.labels, test.pixels, test.labels)
        record = {
            "name": "embedded-pictures",
            "sha256": joint_hash([hashlib.sha256(content).hexdigest() for content in parts]),
        }
        cache = in_first([base], lambda base: _write(base, name, train, test, record), _SPACE)
    return _identity(cache, "embedded", "embedded in ddpexp", "drawn pictures (NOT CIFAR-10)", KINDS)


def _identity(cache: Cache, source: str, way: str, title: str, classes: Sequence[str]) -> dict[str, Any]:
    record = cache.record
    return {
        "name": record["name"],
        "source": source,
        "folder": str(cache.folder),
        "sha256": record["sha256"],
        "num_train": record["num_train"],
        "num_test": record["num_test"],
        "note": f"{title}, {record['num_train']:,} + {record['num_test']:,} images, {way}",
        "mean": list(MEAN),
        "std": list(STD),
        "facts": {
            "num_classes": len(classes),
            "classes": list(classes),
            "shape": list(SHAPE),
            "mean": list(MEAN),
            "std": list(STD),
            "patch_moments": record["patch_moments"],
        },
    }
