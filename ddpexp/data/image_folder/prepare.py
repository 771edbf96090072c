"""Preparing a folder of images: every image is checked once, and decoded into a cache that all workers map.

Standard library only (Pillow is imported when there is something to prepare), and fast to import: the launching command
imports this module.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from ddpexp.data.cache import Cache, cache_name, find_cache, make_cache
from ddpexp.data.hashes import hash_of_range
from ddpexp.data.image_folder.options import MOST_PIXELS, StoredSize, TransformOptions
from ddpexp.data.image_folder.pool import Pool, workers
from ddpexp.data.image_folder.scan import Folder, scan
from ddpexp.data.image_folder.walk import ImageFile
from ddpexp.data.npy import write_file, write_npy
from ddpexp.data.schema import Field, Schema
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.settings.data import CommonData
from ddpexp.settings.key import Key
from ddpexp.system.files import flush, json_line
from ddpexp.system.oom import memory_left
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted, first_few, size_text

_VERSION = 1  # of the files in a cache, and of what `decode` returns
_CHUNK = 16  # images that a process handles at a time, at least
_FLUSH_BYTES = 64 * 2**20  # of a part, which are flushed to the disk while the next ones are decoded
_CHUNKS = 256  # of a part, at most
_LISTED = 3
_SHARE = 0.8  # of the free disk, and of the memory, that a cache may take by itself
_MODES = ("auto", "raw", "jpeg", "none")

Mode = Literal["raw", "jpeg", "none"]


@dataclass(frozen=True)
class Sizes:
    """The size of each image as decoded, and the bytes that a cache takes. Units: bytes."""

    sizes: Mapping[str, Sequence[Any]]  # of each part: [height, width] of each image, None for broken ones
    raw: int
    files: int


def prepare(
    root: str | None,
    cache: Literal["auto", "raw", "jpeg", "none"] = "auto",
    cache_size: int | Literal["auto"] = "auto",
    broken: Literal["stop", "skip"] = "stop",
    channels: Literal[1, 3] = 3,
    size: Annotated[int, Key(at_least=1, at_most=MOST_PIXELS)] = 224,
    eval_size: int | Literal["auto"] = "auto",
    scale: tuple[float, ...] = (0.08, 1.0),
    ratio: tuple[float, ...] = (0.75, 1.3333),
    flip: bool = True,
    color_jitter: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    rand_augment: int = 0,
    rand_augment_magnitude: int = 9,
    mixup: Annotated[float, Key(at_least=0, below=math.inf)] = 0.0,
    cutmix: Annotated[float, Key(at_least=0, below=math.inf)] = 0.0,
    mean: tuple[float, ...] = (0.485, 0.456, 0.406),
    std: tuple[float, ...] = (0.229, 0.224, 0.225),
    size_from_epoch: tuple[tuple[int, ...], ...] | None = None,
    augment_on: Literal["host", "device"] = "host",
    classes: tuple[str, ...] | None = None,
    nested: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make sure that a cache of the images below `root` exists; return a description of the data.

    The arguments are the keys of conf/data/image_folder.yaml. The result is JSON: name, folder (absolute), root,
    hash (of names, classes and sizes of the files, and of how they are decoded), num_train, num_test, note, cache
    (raw, jpeg or none), parts, schema, facts and options. With the `schema` of a run the classes are its own.

    Raises: RefusedError, if the images or an option are invalid, or the cache cannot be written.
    """
    options = TransformOptions(
        size=size,
        eval_size=eval_size,
        scale=scale,
        ratio=ratio,
        flip=flip,
        color_jitter=color_jitter,
        rand_augment=rand_augment,
        rand_augment_magnitude=rand_augment_magnitude,
        mixup=mixup,
        cutmix=cutmix,
        mean=mean,
        std=std,
        channels=channels,
        augment_on=augment_on,
        sizes=tuple(tuple(pair) for pair in size_from_epoch or ()),
    ).resolved()
    stored = options.stored_size(cache_size)
    known = classes if schema is None else Schema.read(schema).classes
    return prepared(scan(root, known, nested), stored, cache, broken, options)


def check(data: CommonData) -> None:
    """Check the keys of every kind of data.

    Raises:
        RefusedError: images of many sizes would be kept in the memory of the device.
    """
    if data.on_device is True:
        raise RefusedError(
            "keeps samples in the memory of the device, and images of many sizes stay on the host",
            key="data.on_device",
            value=True,
            suggestion="Use data.on_device=false; data.augment_on=device augments images on the device.",
        )


def prepared(folder: Folder, stored: StoredSize, cache: str, broken: str, options: TransformOptions) -> dict[str, Any]:
    """Make sure that a cache of the images of a folder exists; return their description. Raises: RefusedError."""
    channels = options.channels
    name = _name(folder, stored, channels)
    complete = _find(folder, name, cache) or _make(folder, name, stored, channels, cache)
    lost = complete.record["broken"]
    if lost and broken == "stop":
        them = "them" if len(lost) > 1 else "it"
        raise RefusedError(
            f"holds {_broken_list(lost)}",
            key="data.root",
            value=folder.root,
            suggestion=f"Replace or remove {them}, or leave {them} out with data.broken=skip.",
        )
    if lost:
        rest = f"; all are in {complete.folder}/identity.json" if len(lost) > _LISTED else ""
        print_message(f"ddpexp: data.broken=skip: {_broken_list(lost)} left out of training and evaluation{rest}")
    return _description(folder, complete, stored, options)


def choose(raw: int, files: int, free: int, memory: int) -> tuple[Mode, str]:
    """Return which cache `data.cache=auto` makes, and why. Units: bytes."""
    if raw <= _SHARE * free and raw <= _SHARE * memory:
        return (
            "raw",
            f"{size_text(raw)} of pixels fit into the free disk ({size_text(free)}) and memory ({size_text(memory)})",
        )
    too_large = "memory" if raw <= _SHARE * free else "the free disk"
    of = memory if raw <= _SHARE * free else free
    if files <= _SHARE * free:
        return (
            "jpeg",
            f"{size_text(raw)} of pixels are too much for {too_large} ({size_text(of)}); the files take "
            f"{size_text(files)}",
        )
    return (
        "none",
        f"the free disk ({size_text(free)}) has no room for {size_text(raw)} of pixels or {size_text(files)} of files",
    )


def _bases(folder: Folder) -> list[Path]:
    return [folder.root, user_cache()]


def _name(folder: Folder, stored: StoredSize, channels: int) -> str:
    """Return what the names of caches end with."""
    files = {
        part: [[file.path, file.label, file.num_bytes, file.modified] for file in files]
        for part, files in folder.parts.items()
    }
    return cache_name("", [*_form(stored, channels), folder.classes, files])


def _form(stored: StoredSize, channels: int) -> list[Any]:
    """Return what the pixels in a cache depend on, beside the files."""
    return [_VERSION, stored.side if stored.largest == stored.side else stored, channels]


def _find(folder: Folder, name: str, mode: str) -> Cache | None:
    """Return a complete cache of these very files."""
    modes = [mode] if mode != "auto" else _MODES[1:]
    return next(filter(None, (find_cache(_bases(folder), f"images-{one}{name}") for one in modes)), None)


def _make(folder: Folder, name: str, stored: StoredSize, channels: int, mode: str) -> Cache:
    total = sum(map(len, folder.parts.values()))
    with workers(total, stored, channels) as pool:
        sizes = _measure(folder, pool, channels)
        if mode == "auto":
            free, memory = _free(folder), _memory()
            mode, why = choose(sizes.raw, sizes.files, free, memory)
            reduced = _reduced(sizes, stored, channels)
            if mode != "raw" and choose(reduced, sizes.files, free, memory)[0] == "raw":
                why += f"; with data.cache_size={stored.side} the pixels would take {size_text(reduced)}, and fit"
            print_message(f"ddpexp: data.cache={mode}: {why}", sys.stdout)
        space = {"raw": sizes.raw, "jpeg": sizes.files}.get(mode, 0) + 100 * total

        def fill(place: Path) -> dict[str, Any]:
            return _fill(place, folder, sizes, mode, channels, pool)

        files = [folder.root / file.path for files in folder.parts.values() for file in files]
        name = f"images-{mode}{name}"
        return make_cache(_bases(folder), name, fill, size_text(space), "preparing the same images", files)


def _measure(folder: Folder, pool: Pool, channels: int) -> Sizes:
    """Read the headers of all images, so that the sizes of caches are known before one is written."""
    found: dict[str, list[Any]] = {}
    for part, files in folder.parts.items():
        chunks = [
            {"work": "measure", "images": [[str(folder.root / file.path), 0] for file in files[begin:end]]}
            for begin, end in _ranges(len(files))
        ]
        answers = pool.run_all(chunks, "reading sizes")
        found[part] = [size for answer in answers for size in answer["sizes"]]
    raw = sum(size[0] * size[1] * channels for sizes in found.values() for size in sizes if size)
    return Sizes(found, raw, sum(file.num_bytes for files in folder.parts.values() for file in files))


def _reduced(sizes: Sizes, stored: StoredSize, channels: int) -> int:
    """Return about how many bytes the pixels take if all are reduced to `stored.side`."""
    shapes = (size for sizes in sizes.sizes.values() for size in sizes if size)
    return sum(
        int(height * width * channels * min(1.0, stored.side / min(height, width)) ** 2) for height, width in shapes
    )


def _fill(place: Path, folder: Folder, sizes: Sizes, mode: str, channels: int, pool: Pool) -> dict[str, Any]:
    """Write all parts to a folder, in which a killed command may have begun. Raises: OSError."""
    lost: dict[str, str] = {}
    nums, chunks = {}, {}
    for part, files in folder.parts.items():
        lengths = [_length(file, size, mode, channels) for file, size in zip(files, sizes.sizes[part], strict=True)]
        offsets = [0, *accumulate(lengths)]
        if mode != "none":
            _reserve(place / f"{part}.bin", offsets[-1])
        done = _run_chunks(place, part, [str(folder.root / file.path) for file in files], offsets, mode, pool)
        broken = {number: reason for chunk in done for number, reason in chunk.broken.items()}
        kept = [number for number in range(len(files)) if number not in broken]
        if not kept:
            raise RefusedError(
                f"None of the {len(files):,} images for {part} can be read", key="data.root", value=folder.root
            )
        _write_index(place, part, [files[number] for number in kept], [
            (offsets[number], *sizes.sizes[part][number], lengths[number]) for number in kept
        ])  # fmt: skip
        nums[part] = len(kept)
        if mode != "none":
            chunks[f"{part}.bin"] = [(offsets[chunk.end], chunk.hash) for chunk in done]
        lost |= {files[number].path: reason for number, reason in broken.items()}
    for marker in place.glob("*.done"):
        marker.unlink()
    return {"parts": nums, "broken": lost, "chunks": chunks}


def _length(file: ImageFile, size: Any, mode: str, channels: int) -> int:
    """Return the bytes of an image in the cache."""
    if size is None or mode == "none":
        return 0
    return int(size[0] * size[1] * channels) if mode == "raw" else file.num_bytes


@dataclass(frozen=True)
class _Done:
    """A chunk of images that was written: its end, the hash of its bytes, and the reasons why images are broken."""

    end: int
    hash: str
    broken: Mapping[int, str]


def _run_chunks(
    place: Path, part: str, paths: Sequence[str], offsets: Sequence[int], mode: str, pool: Pool
) -> list[_Done]:
    """Decode what a killed command has not; return all chunks, in their order."""
    unflushed = 0
    target = place / f"{part}.bin" if mode != "none" else None
    done = {}
    chunks = []
    ranges = []
    for begin, end in _ranges(len(paths)):
        marker = place / f"{part}-{begin}.done"
        known = _read_marker(marker, end)
        if known and (target is None or hash_of_range(target, offsets[begin], offsets[end]) == known.hash):
            done[begin] = known
            continue
        marker.unlink(missing_ok=True)
        chunks.append({
            "work": {"raw": "pixels", "jpeg": "bytes", "none": "check"}[mode],
            "target": str(target) if target else None,
            "images": [[path, offset] for path, offset in zip(paths[begin:end], offsets[begin:end], strict=True)],
            "lengths": [offsets[number + 1] - offsets[number] for number in range(begin, end)],
        })  # fmt: skip
        ranges.append((begin, end))

    def finish(number: int, answer: dict[str, Any]) -> None:
        nonlocal unflushed
        begin, end = ranges[number]
        done[begin] = _Done(end, answer["hash"], {begin + place: reason for place, reason in answer["broken"]})
        # Not flushed: after a power failure the hash says whether the pixels are on the disk.
        (place / f"{part}-{begin}.done").write_bytes(json_line(vars(done[begin])))
        unflushed += offsets[end] - offsets[begin]
        if target is not None and unflushed >= _FLUSH_BYTES:
            flush(target)  # what is written at once at the end would have to be waited for
            unflushed = 0

    pool.run(chunks, f"preparing {part}", finish)
    return [done[begin] for begin, _ in _ranges(len(paths))]


def _read_marker(marker: Path, end: int) -> _Done | None:
    """Return the chunk that an earlier command has done; None if it has not."""
    try:
        record = json.loads(marker.read_bytes())
        broken = {int(number): str(reason) for number, reason in record["broken"].items()}
        done = _Done(record["end"], record["hash"], broken)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return done if done.end == end else None


def _ranges(total: int) -> list[tuple[int, int]]:
    length = max(_CHUNK, -(-total // _CHUNKS))
    return [(begin, min(begin + length, total)) for begin in range(0, total, length)]


def _reserve(path: Path, size: int) -> None:
    """Take the space for a file at once: a disk that is too small is noticed before anything is decoded."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
        os.truncate(descriptor, size)
    finally:
        os.close(descriptor)


def _write_index(place: Path, part: str, files: Sequence[ImageFile], rows: Sequence[tuple[int, ...]]) -> None:
    """Write where each image is, its height, width and bytes, its class, and its name."""
    names = [os.fsencode(file.path) for file in files]
    ends = list(accumulate(map(len, names)))
    table = array("q", (value for row in rows for value in row))
    for name, shape, values in (
        ("index", (len(rows), 4), table),
        ("labels", (len(files),), array("q", (file.label for file in files))),
        ("name-ends", (len(files),), array("q", ends)),
    ):
        (place / f"{part}-{name}.npy").unlink(missing_ok=True)
        write_npy(place / f"{part}-{name}.npy", shape, values.tobytes(), "<i8")
    (place / f"{part}-names.bin").unlink(missing_ok=True)
    write_file(place / f"{part}-names.bin", b"".join(names))


def _free(folder: Folder) -> int:
    """Return the free bytes where the cache would be written."""
    for base in _bases(folder):
        place = next(parent for parent in (base, *base.parents) if parent.exists())
        if os.access(place, os.W_OK):
            return shutil.disk_usage(place).free
    return 0


def _memory() -> int:
    """Return the free memory of this machine or container. Units: bytes."""
    free = memory_left()
    return free if free is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _broken_list(lost: Mapping[str, str]) -> str:
    few = first_few([f"{path}: {reason}" for path, reason in sorted(lost.items())], _LISTED, "; ")
    return f"{counted(len(lost), 'broken image')} ({few})"


def _description(folder: Folder, cache: Cache, stored: StoredSize, options: TransformOptions) -> dict[str, Any]:
    nums, lost = cache.record["parts"], cache.record["broken"]
    digest = hashlib.sha256(json.dumps([*_form(stored, options.channels), folder.classes]).encode())
    for part, files in folder.parts.items():
        for file in files:
            if file.path not in lost:
                digest.update(
                    f"{part}\0{file.path}\0{file.label}\0{file.num_bytes}\n".encode("utf-8", "surrogateescape")
                )
    mode = cache.folder.name.split("-")[1]
    num_train, num_test = nums.get("train", 0), nums.get("eval", 0)
    size = sum(cache.record["sizes"].values())
    schema = Schema(
        (options.channels, options.size, options.size),
        (Field("image", "image"),),
        "float32",
        (Field("class", "category", tuple(folder.classes)),),
        num_outputs=len(folder.classes),
        channels=options.channels,
        mean=options.mean,
        std=options.std,
    )
    facts = schema.facts()
    return {
        "name": "image_folder",
        "folder": str(cache.folder),
        "root": str(folder.root),
        "hash": digest.hexdigest(),
        "num_train": num_train,
        "num_test": num_test,
        "note": f"{num_train:,} + {num_test:,} images of {len(folder.classes):,} classes, from {folder.root}"
        + (f" ({folder.left_out})" if folder.left_out else "")
        + (f", none of {first_few(folder.without_images)} to train on" if folder.without_images else "")
        + f", data.cache={mode} ({size_text(size)} in {cache.folder})",
        "cache": mode,
        "stored": list(stored),
        "parts": list(nums),
        "schema": schema.as_json(),
        "facts": {key: facts[key] for key in ("classes", "num_classes", "num_outputs", "shape", "mean", "std")},
        **options.as_json(),
    }
