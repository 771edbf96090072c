"""The index of tar shards: where each file of each sample lies. Free of torch; made once, before the workers start."""

from __future__ import annotations

import glob
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ddpexp.data.cache import cache_name, make_cache, user_cache
from ddpexp.errors import RefusedError

INDEX = "index.npy"  # of each sample: its shard, then offset and size of each of its files
DECODED = ("jpg", "jpeg", "png", "webp", "json", "txt", "cls", "npy")
_END = bytes(512)  # a block of zeros ends an archive


def prepare(
    path: str,
    eval_path: str | None = None,
    files: list[str] | tuple[str, ...] = ("jpg", "cls"),
    image_size: int | None = None,
    shuffle: Literal["global", "blocks"] = "global",
    block_samples: int = 1024,
    window_blocks: int = 16,
) -> dict[str, Any]:
    """Index the shards that two patterns name, unless a cache holds the index of the same files.

    Raises:
        RefusedError: a shard is cut off or lacks a file, or a key means nothing.
    """
    numbers = {"block_samples": block_samples, "window_blocks": window_blocks, "image_size": image_size}
    for key, value in numbers.items():
        if value is not None and value < 1:
            raise RefusedError(f"data.{key}={value}: use 1 or more.")
    for name in files:
        if unknown := [one for one in name.split(";") if one.rpartition(".")[2] not in DECODED]:
            raise RefusedError(
                f"data.files names {unknown[0]}, which is not decoded: use {', '.join(DECODED)}, behind a prefix where "
                "there is one, such as left.jpg."
            )
    if not files:
        raise RefusedError(
            "data.files=[]: name the files of a sample by their extensions, such as data.files=[jpg,cls]."
        )
    sets = {"train": _indexed("data.path", path, files)}
    if eval_path is not None:
        sets["eval"] = _indexed("data.eval_path", eval_path, files)
    counts = ", ".join(f"{one['num_samples']:,} samples in {len(one['shards'])} shards" for one in sets.values())
    return {
        "name": "tar_shards",
        "sets": sets,
        "files": list(files),
        "image_size": image_size,
        "shuffle": shuffle,
        "block_samples": block_samples,
        "window_blocks": window_blocks,
        "hash": cache_name("tar_shards", [[one["identity"], list(files)] for one in sets.values()]),
        "num_train": sets["train"]["num_samples"],
        "num_test": sets["eval"]["num_samples"] if eval_path is not None else 0,
        "note": f"tar shards: {counts}",
    }


def _indexed(key: str, pattern: str, files: Sequence[str]) -> dict[str, Any]:
    paths = sorted(path for path in glob.glob(os.path.expanduser(pattern)) if os.path.isfile(path))
    if not paths:
        raise RefusedError(f"{key}={pattern} names no file: give a pattern of tar files, such as data/train-*.tar.")
    stats = [os.stat(path) for path in paths]
    identity = [[Path(path).name, stat.st_size] for path, stat in zip(paths, stats, strict=True)]
    made = [stat.st_mtime_ns for stat in stats]
    name = cache_name("tar_shards", [identity, made, list(files)])

    def fill(folder: Path) -> Mapping[str, Any]:
        rows = [row for number, path in enumerate(paths) for row in read_index(path, number, files)]
        if not rows:
            raise RefusedError(f"{key}={pattern}: the shards hold no samples.")
        np.save(folder / INDEX, np.array(rows, np.int64))
        return {"num_samples": len(rows)}

    cache = make_cache([Path(paths[0]).parent, user_cache()], name, fill, wait="indexing the same shards")
    shards = [os.path.abspath(path) for path in paths]
    return {
        "shards": shards,
        "identity": identity,
        "num_samples": cache.record["num_samples"],
        "index": str(cache.folder / INDEX),
    }


def read_index(path: str, number: int, files: Sequence[str]) -> list[list[int]]:
    """Return a row for each sample of a shard: its number, then offset and size of each file.

    Files with the same name up to its first dot are a sample; they follow one another.

    Raises:
        RefusedError: the shard is no tar file, cut off or compressed, or a sample lacks a file.
    """
    rows: list[list[int]] = []
    sample: dict[str, tuple[int, int]] = {}
    stem: str | None = None
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isreg():
                    continue
                folder, _, name = member.name.rpartition("/")
                base, _, extension = name.partition(".")
                here = f"{folder}/{base}"
                if here != stem and stem is not None:
                    rows.append(_row(path, number, stem, sample, files))
                    sample = {}
                stem = here
                sample[extension.lower()] = (member.offset_data, member.size)
            if stem is not None:
                rows.append(_row(path, number, stem, sample, files))
            end = archive.offset
    except (tarfile.TarError, OSError, EOFError) as error:
        raise RefusedError(f"{path} cannot be read as a tar file: {error}. Is it cut off, or compressed?") from None
    with open(path, "rb") as file:
        file.seek(max(0, end - len(_END)))
        if _END not in (file.read(len(_END)), file.read(len(_END))):
            raise RefusedError(f"{path} is cut off: it does not end as a tar file does. Copy it again.")
    return rows


def _row(path: str, number: int, stem: str, sample: Mapping[str, tuple[int, int]], files: Sequence[str]) -> list[int]:
    row = [number]
    for name in files:
        found = next((sample[one] for one in name.split(";") if one in sample), None)
        if found is None:
            raise RefusedError(
                f"the sample {stem.lstrip('/')} of {path} has no file .{name.replace(';', ' or .')} but only "
                f".{', .'.join(sorted(sample))}: name the files of every sample in data.files."
            )
        row += found
    return row
