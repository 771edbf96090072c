"""Preparing MNIST: found or downloaded, and decoded once into memory-mappable `.npy` files.

The rules, in the order they apply:

- A file that exists but is wrong is always refused; nothing replaces it.
- `files` uses existing files. `download` fetches missing ones. `auto` does the same, and only if none of the four files
  exists and no download succeeds does it fall back to synthetic digits, with a warning.
- All content is checked against its SHA-256 before it is used, so the cache is named by its content.
- The cache is in the data folder if that can be written, otherwise in the user's cache folder.

Standard library only, and fast to import, like the modules it imports: the launching command imports this module.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ddpexp.data.cache import CACHES, Cache, in_first, read_cache, update_cache, write_cache
from ddpexp.data.folders import Stamp, bases_of, data_folder, joint_hash, store, to_stderr, unchanged
from ddpexp.data.images.files import found_images
from ddpexp.data.mirrors import (
    AUTO_PATIENCE,
    DOWNLOAD_PATIENCE,
    DownloadError,
    Patience,
    alone,
    download_unless_failed,
)
from ddpexp.data.mnist import idx
from ddpexp.data.npy import write_npy
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SOURCES = ("auto", "files", "download", "embedded")
MEAN, STD = 0.1307, 0.3081  # of the training images, as fractions of 255
EMBEDDED_VERSION = 1  # increase it when synthetic.py changes: it is part of the name of caches
EMBEDDED_SEEDS = (1, 2)  # of the training and of the test digits
EMBEDDED_MOST = 1_000_000  # images per part: they are drawn in memory
_FAILURE = "download-failed"  # the note of a failed download, in the user's cache


def prepare(
    root: str | None,
    source: Literal["auto", "files", "download", "embedded"],
    embedded_train: int = 60_000,
    embedded_test: int = 10_000,
    *,
    warn: Callable[[str], None] | None = None,
    mirrors: Sequence[str] = MIRRORS,
    patience: Patience | None = None,
) -> dict[str, Any]:
    """Make sure that a decoded cache exists; return a description of the data.

    `root` None stands for `$DDPEXP_DATA`, else for the user's cache folder. `warn` (default: a line on stderr) is
    called if synthetic digits replace MNIST. `patience` defaults to AUTO_PATIENCE or DOWNLOAD_PATIENCE by source.

    The result is JSON: name, source, folder (absolute), sha256 (over the SHA-256 of the four unpacked IDX files),
    num_train, num_test, note (a phrase for people), mean and std of the pixels, facts (which a configuration may refer
    to).

    Raises: RefusedError, if the data or a folder is invalid.
    """
    if source not in SOURCES:
        raise RefusedError(
            "is not a source of data", key="data.source", value=source, suggestion=f"Use one of {', '.join(SOURCES)}."
        )
    for key, num in (("data.embedded_train", embedded_train), ("data.embedded_test", embedded_test)):
        if not 1 <= num <= EMBEDDED_MOST:
            raise RefusedError(
                "is not a valid number of digits", key=key, value=num, suggestion=f"Use 1 to {EMBEDDED_MOST}."
            )
    if source == "embedded":
        return _embedded(embedded_train, embedded_test)
    folder = data_folder(root, "the MNIST files", source)
    if root is not None:
        _check_not_images(folder)
    patience = patience or (AUTO_PATIENCE if source == "auto" else DOWNLOAD_PATIENCE)
    try:
        return _mnist(folder, source, mirrors, patience)
    except DownloadError as error:
        if source == "download":
            raise RefusedError(
                f"MNIST could not be downloaded ({error}), so there is nothing to train on",
                suggestion=f"Put the four files into data.root={folder}, or check the network, or set "
                "data.source=embedded for synthetic digits.",
            ) from None
        (warn or to_stderr)(
            f"THIS IS NOT MNIST: data.root={folder} holds none of its files and they could not be downloaded "
            f"({error}), so {embedded_train:,} + {embedded_test:,} synthetic digits stand in and no accuracy is "
            "comparable with MNIST; for the real data put the four IDX files into that folder or set "
            "data.source=download, and set data.source=embedded if synthetic digits are what you want"
        )
        return _embedded(embedded_train, embedded_test)


def _check_not_images(folder: Path) -> None:
    """Check that a folder without MNIST does not hold images of the user's own."""
    if not idx.find([folder]) and not _caches([folder]) and (images := found_images(folder)) is not None:
        raise RefusedError(
            f"holds {images}, but none of the four MNIST files that data=mnist reads there",
            key="data.root",
            value=folder,
            suggestion="For images of your own see data=images, or a recipe of your own; for MNIST leave data.root out "
            "or name another folder.",
        )


def _mnist(root: Path, source: str, mirrors: Sequence[str], patience: Patience) -> dict[str, Any]:
    """Get MNIST from the cache, the files or the network, in this order.

    If several commands run at the same time, one of them downloads.

    Raises: DownloadError, if none of the files exists and they could not be downloaded.
    """
    identity = _local(root, source)
    if identity is None:
        with alone(patience.total):
            identity = _local(root, source) or _fetched(root, source, mirrors, patience)
    return identity


def _local(root: Path, source: str) -> dict[str, Any] | None:
    """Get MNIST from the cache or the files; None if something must be downloaded."""
    bases = bases_of(root)
    caches = _caches(bases)
    for cache in caches:
        if cache.record.get("root") == str(root) and unchanged(cache.record):
            return _mnist_identity(cache, source)
    found = idx.find(bases if source != "files" else [root])
    missing = [file for file in idx.FILES if file.name not in found]
    if source == "files" and missing:
        raise _missing(root, missing, suggestion="Or set data.source=download to fetch what is missing.")
    if not found and caches:  # checked once, and complete: the files themselves are no longer needed
        return _mnist_identity(caches[0], source)
    if missing:
        return None
    return _decoded(root, source, "files", {file.name: idx.load(found[file.name], file) for file in idx.FILES})


def _fetched(root: Path, source: str, mirrors: Sequence[str], patience: Patience) -> dict[str, Any]:
    """Download what is missing. Raises: DownloadError, if none of the files exists."""
    bases = bases_of(root)
    found = idx.find(bases)
    missing = [file for file in idx.FILES if file.name not in found]
    loaded = {file.name: idx.load(path, file) for file in idx.FILES if (path := found.get(file.name))}
    try:
        for content, packed in download_unless_failed(missing, mirrors, patience, source == "download", _FAILURE):
            stamp = in_first(bases, functools.partial(store, content.file.remote_name, packed))
            loaded[content.file.name] = (content, stamp)
    except DownloadError as error:
        if not found:
            raise
        raise _missing(root, missing, f", and they could not be downloaded either ({error})") from None
    return _decoded(root, source, "download", loaded)


def _decoded(root: Path, source: str, way: str, loaded: Mapping[str, tuple[idx.Content, Stamp]]) -> dict[str, Any]:
    """Write the checked contents to a cache, unless one contains them already."""
    record = {
        "name": "mnist",
        "source": way,
        "sha256": _sha256(),
        "root": str(root),
        "stamps": [vars(loaded[file.name][1]) for file in idx.FILES],
    }
    bases = bases_of(root)
    caches = _caches(bases)
    if caches:
        return _mnist_identity(update_cache(caches[0], record), source)
    contents = [loaded[file.name][0] for file in idx.FILES]
    return _mnist_identity(in_first(bases, lambda base: _write(base, _cache_name(), contents, record)), source)


def _write(base: Path, name: str, contents: Sequence[idx.Content], record: Mapping[str, Any]) -> Cache:
    """Write the arrays of all four files to a cache. Raises: OSError."""

    def fill(folder: Path) -> None:
        for content in contents:
            file = content.file
            write_npy(folder / file.cached, file.shape, memoryview(content.unpacked)[len(file.header) :])

    train, test = contents[0].file.shape[0], contents[2].file.shape[0]
    return write_cache(base, name, fill, {**record, "num_train": train, "num_test": test})


def _caches(bases: Sequence[Path]) -> list[Cache]:
    return [cache for base in bases if (cache := read_cache(base / CACHES / _cache_name()))]


def _sha256() -> str:
    return joint_hash([file.sha256 for file in idx.FILES])


def _cache_name() -> str:
    return f"mnist-{_sha256()[:12]}"


def _missing(root: Path, missing: Sequence[idx.IdxFile], problem: str = "", suggestion: str = "") -> RefusedError:
    names = ", ".join(file.name for file in missing)
    return RefusedError(
        f"holds {len(idx.FILES) - len(missing)} of the four MNIST files (also looked in MNIST/raw and raw), and "
        f"training needs all four{problem}",
        key="data.root",
        value=root,
        suggestion=f"Add {names} there, each with or without .gz. {suggestion}".rstrip(),
    )


def _mnist_identity(cache: Cache, source: str) -> dict[str, Any]:
    origin = "files" if source == "files" else cache.record["source"]
    folders = ", ".join(dict.fromkeys(os.path.dirname(stamp["path"]) for stamp in cache.record["stamps"]))
    way = "from files in" if origin == "files" else "downloaded to"
    return _identity(cache, origin, f"{way} {folders}", "MNIST")


def _embedded(num_train: int, num_test: int) -> dict[str, Any]:
    """Get the synthetic digits from the cache, or draw them."""
    name = f"embedded-v{EMBEDDED_VERSION}-{num_train}-{num_test}"
    base = user_cache()
    cache = read_cache(base / CACHES / name)
    if cache is None:
        contents = _draw((num_train, num_test))
        record = {
            "name": "embedded-digits",
            "sha256": joint_hash([content.file.sha256 for content in contents]),
        }
        cache = in_first([base], lambda base: _write(base, name, contents, record))
    return _identity(cache, "embedded", "embedded in ddpexp", "synthetic digits (NOT MNIST)")


def _draw(nums: tuple[int, int]) -> list[idx.Content]:
    """Draw both parts as the contents of IDX files, so that they are hashed and cached like MNIST."""
    from ddpexp.data.mnist import synthetic  # late: it imports numpy, which the command does not need otherwise

    contents = []
    for num, seed, (images_file, labels_file) in zip(nums, EMBEDDED_SEEDS, (idx.FILES[:2], idx.FILES[2:]), strict=True):
        images, labels = synthetic.draw(num, seed)
        for file, array in ((images_file, images), (labels_file, labels)):
            shaped = replace(file, shape=array.shape)
            unpacked = shaped.header + array.tobytes()
            contents.append(idx.Content(replace(shaped, sha256=hashlib.sha256(unpacked).hexdigest()), unpacked))
    return contents


def _identity(cache: Cache, source: str, way: str, title: str) -> dict[str, Any]:
    record = cache.record
    return {
        "name": record["name"],
        "source": source,
        "folder": str(cache.folder),
        "sha256": record["sha256"],
        "num_train": record["num_train"],
        "num_test": record["num_test"],
        "note": f"{title}, {record['num_train']:,} + {record['num_test']:,} images, {way}",
        "mean": [MEAN],
        "std": [STD],
        "facts": {
            "num_classes": 10,
            "classes": [str(digit) for digit in range(10)],
            "shape": [1, 28, 28],
            "mean": [MEAN],
            "std": [STD],
        },
    }
