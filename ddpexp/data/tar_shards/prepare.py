"""The index of tar shards: where each file of each sample lies. Free of torch; made once, before the workers start."""

from __future__ import annotations

import glob
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np

from ddpexp.data.cache import cache_name, make_cache
from ddpexp.data.hashes import is_reading_again
from ddpexp.data.named_files import source_of
from ddpexp.data.part_names import overlap
from ddpexp.data.schema import Field, Kind, Schema
from ddpexp.data.tar_shards import remote
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.settings.key import Key
from ddpexp.system.files import open_regular
from ddpexp.system.preparation import preparation

INDEX = "index.npy"  # of each sample: its shard, then offset, size and number of the alternative of each file
DECODED: Mapping[str, Kind] = {
    "jpg": "image", "jpeg": "image", "png": "image", "webp": "image", "json": "number", "txt": "text",
    "cls": "category", "npy": "number",
}  # fmt: skip
_VERSION = 2  # increase it when the content of indexes changes: it is part of their names
_BLOCK = 1 << 20  # bytes
_MOST_LINKS = 40  # from one member to the next, as Linux follows them
_NO_FILES = (tarfile.DIRTYPE, b"D", b"V")  # folders, also with the list of what is in them, and the label of an archive
_END = bytes(512)  # a block of zeros ends an archive
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")  # {000..099}


def prepare(
    path: str,
    eval_path: str | None = None,
    files: list[str] | tuple[str, ...] = ("jpg", "cls"),
    image_size: Annotated[int | None, Key(at_least=1)] = None,
    shuffle: Literal["global", "blocks"] = "global",
    block_samples: Annotated[int, Key(at_least=1)] = 1024,
    window_blocks: Annotated[int, Key(at_least=1)] = 16,
    cache_gb: float = 20.0,
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Index the shards that two patterns name, unless a cache holds the index of the same files.

    Remote shards are read through a cache on this machine of at most `cache_gb` * 1e9 bytes.

    Raises:
        RefusedError: a shard is cut off or lacks a file, or a key means nothing.
    """
    _check_files(files)
    limit = int(cache_gb * 1e9)
    if limit < 2 * remote.PART:
        raise RefusedError(
            key="data.cache_gb",
            value=cache_gb,
            suggestion=f"Use {2 * remote.PART / 1e9:.3f} or more, room for two parts.",
        )
    decided = _schema(files, image_size)
    if schema is not None:
        _check_fits(decided, Schema.read(schema), files)
    sets = {"train": _indexed("data.path", path, files, limit)}
    if eval_path is not None:
        sets["eval"] = _indexed("data.eval_path", eval_path, files, limit)
    counts = ", ".join(f"{one['num_samples']:,} samples in {len(one['shards'])} shards" for one in sets.values())
    return {
        "name": "tar_shards",
        "sets": sets,
        "files": list(files),
        "schema": decided.as_json(),
        "image_size": image_size,
        "shuffle": shuffle,
        "block_samples": block_samples,
        "window_blocks": window_blocks,
        "hash": cache_name("tar_shards", [[one["identity"], list(files)] for one in sets.values()]),
        "num_train": sets["train"]["num_samples"],
        "num_test": sets["eval"]["num_samples"] if eval_path is not None else 0,
        "note": f"tar shards: {counts}{overlap(*(one['shards'] for one in sets.values())) if len(sets) > 1 else ''}",
    }


def _check_files(files: Sequence[str]) -> None:
    for name in files:
        if unknown := [one for one in name.split(";") if one.rpartition(".")[2] not in DECODED]:
            raise RefusedError(
                f"names {unknown[0]}, a file type that cannot be decoded",
                key="data.files",
                suggestion=f"Use {', '.join(DECODED)}, after a prefix if files have one, such as left.jpg.",
            )
    if not files:
        raise RefusedError(
            key="data.files",
            value=[],
            suggestion="Name the files of a sample by their extensions, such as data.files=[jpg,cls].",
        )


def _schema(files: Sequence[str], image_size: int | None) -> Schema:
    """Return what a sample consists of: its last file is the target, if it has several."""
    fields = [Field(name, DECODED[name.partition(";")[0].rpartition(".")[2]]) for name in files]
    split = max(1, len(fields) - 1)
    channels = 3 if fields[0].kind == "image" else None
    shape = () if channels is None or image_size is None else (channels, image_size, image_size)
    return Schema(shape, tuple(fields[:split]), "float32", tuple(fields[split:]), channels=channels)


def _check_fits(decided: Schema, known: Schema, files: Sequence[str]) -> None:
    """Raise RefusedError if samples have other contents than those that were trained on."""
    ours, theirs = ([[one.kind for one in part] for part in (one.inputs, one.targets)] for one in (decided, known))
    if ours != theirs:
        names = [str(one.name) for one in (*known.inputs, *known.targets)]
        raise RefusedError(
            "makes samples of other kinds than the model was trained on",
            key="data.files",
            value=f"[{','.join(files)}]",
            suggestion=f"Use data.files=[{','.join(names)}], or files of the same kinds.",
        )
    if decided.shape != known.shape:
        size = known.shape[-1] if known.shape else "null"
        raise RefusedError(
            "makes images of another size than the model was trained on",
            key="data.image_size",
            suggestion=f"Use data.image_size={size}.",
        )


def _indexed(key: str, pattern: str, files: Sequence[str], limit: int) -> dict[str, Any]:
    if remote.is_remote(pattern):
        shards = remote.find(key, expand(pattern), limit)
        if is_reading_again():
            for shard in shards:
                shard.verify()
        paths = [shard.url for shard in shards]
        sizes = [shard.size for shard in shards]
        made: list[Any] = [shard.version for shard in shards]
        bases = [user_cache()]
    else:
        shards = []
        names = {path for one in expand(pattern) for path in glob.glob(os.path.expanduser(one))}
        paths = sorted(os.path.abspath(path) for path in names if not os.path.isdir(path))
        sources = [source_of(key, path, pattern) for path in paths]
        sizes, made = [source.size for source in sources], [source.modified for source in sources]
        bases = [Path(paths[0]).parent, user_cache()] if paths else []
    if not paths:
        raise RefusedError(
            "matches no file",
            key=key,
            value=pattern,
            suggestion="Give a pattern of tar files, such as data/train-*.tar.",
        )
    identity = [[path.rpartition("/")[2], size] for path, size in zip(paths, sizes, strict=True)]
    name = cache_name("tar_shards", [_VERSION, identity, made, list(files)])

    def fill(folder: Path) -> Mapping[str, Any]:
        rows = []
        with preparation(len(paths), "indexing the shards", "shards") as advance:
            for number, path in enumerate(paths):
                with remote.RemoteFile(shards[number]) if shards else open_regular(path) as file:
                    rows += read_index(file, path, number, files)
                advance(1)
        if not rows:
            raise RefusedError("The shards hold no samples", key=key, value=pattern)
        np.save(folder / INDEX, np.array(rows, np.int64))
        return {"num_samples": len(rows)}

    cache = make_cache(bases, name, fill, wait="indexing the same shards", sources=[] if shards else paths)
    return {
        "shards": paths,
        "identity": identity,
        "remote": [asdict(shard) for shard in shards],
        "num_samples": cache.record["num_samples"],
        "index": str(cache.folder / INDEX),
    }


def expand(pattern: str) -> list[str]:
    """Return the patterns that one with ranges such as {000..099} stands for; others stay as they are."""
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    first, last = found.groups()
    before, after = pattern[: found.start()], expand(pattern[found.end() :])
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [before + number + rest for number in numbers for rest in after]


def read_index(file: BinaryIO | remote.RemoteFile, path: str, number: int, files: Sequence[str]) -> list[list[int]]:
    """Return a row for each sample of a shard, an open file: its number, then for each file offset, size and which.

    Files with the same name up to its first dot are a sample; they follow one another. As in WebDataset, names that
    begin with a dot or have none do not count. `which` counts the alternatives
    of a name such as jpg;png.

    Raises:
        RefusedError: the shard is no tar file, cut off or compressed, or a sample lacks a file or has one in a form
            that has no single place in the shard.
    """
    rows: list[list[int]] = []
    sample: dict[str, _Place] = {}
    stem: str | None = None
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            places = _Places(archive)
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                base, _, extension = name.partition(".")
                if member.type in _NO_FILES or not base or not extension:
                    continue
                here = f"{folder}/{base}"
                if here != stem and stem is not None:
                    rows.append(_row(path, number, stem, sample, files))
                    sample = {}
                stem = here
                sample[extension.lower()] = places.of(member)
            if stem is not None:
                rows.append(_row(path, number, stem, sample, files))
            end = archive.offset
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise RefusedError(
            f"cannot be read as a tar file: {error}",
            suggestion="Check that it is complete and not compressed.",
            place=path,
        ) from None
    _check_end(file, path, end)
    return rows


def _check_end(file: BinaryIO | remote.RemoteFile, path: str, end: int) -> None:
    """Check that a shard ends as a tar file does, and that nothing is behind the end of the archive."""
    file.seek(max(0, end - len(_END)))
    if _END not in (file.read(len(_END)), file.read(len(_END))):
        raise RefusedError(
            "is cut off or damaged: it has no end of a tar file", suggestion="Copy it again.", place=path
        )
    while block := file.read(_BLOCK):
        if any(block):
            raise RefusedError(
                "has data after the end of its archive, which would not be read: several archives may have been "
                "joined by cat",
                suggestion="Name the archives one by one, or join them with tar --concatenate.",
                place=path,
            )


@dataclass(frozen=True)
class _Place:
    """Where the content of a member lies in its shard, or the reason why it lies in no single place."""

    offset: int = 0
    size: int = 0
    problem: str | None = None


class _Places:
    """The places of the members of an archive; links to other members are followed."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        """All members by name; of several with one name the last counts, as for who unpacks the archive."""
        return {os.path.normpath(member.name): member for member in self._archive.getmembers()}

    def of(self, member: tarfile.TarInfo) -> _Place:
        for _ in range(_MOST_LINKS):
            if not member.islnk() and not member.issym():
                return _place(member)
            folder = os.path.dirname(member.name) if member.issym() else ""
            target = self._members.get(os.path.normpath(os.path.join(folder, member.linkname)))
            if target is None:
                return _Place(problem=f"is a link to {member.linkname}, which the shard does not hold")
            member = target
        return _Place(problem="is a link to itself")


def _place(member: tarfile.TarInfo) -> _Place:
    """Return the place of a member that is no link."""
    if member.issparse():
        return _Place(problem="was stored with holes (tar --sparse): write the shard without that option")
    if member.type not in tarfile.REGULAR_TYPES:
        kinds = {tarfile.DIRTYPE: "a folder", tarfile.FIFOTYPE: "a named pipe", tarfile.CHRTYPE: "a device",
                 tarfile.BLKTYPE: "a device"}  # fmt: skip
        return _Place(problem=f"is {kinds.get(member.type, f'of the type {member.type!r}')}, not a file")
    return _Place(member.offset_data, member.size)


def _row(path: str, number: int, stem: str, sample: Mapping[str, _Place], files: Sequence[str]) -> list[int]:
    row = [number]
    for name in files:
        which, extension = next(((which, one) for which, one in enumerate(name.split(";")) if one in sample), (0, None))
        if extension is None:
            raise RefusedError(
                f"the sample {stem.lstrip('/')} of {path} has no file .{name.replace(';', ' or .')} but only "
                f".{', .'.join(sorted(sample))}",
                suggestion="Name the files of every sample in data.files; in the shard they follow one "
                "another (tar --sort=name).",
            )
        place = sample[extension]
        if place.problem is not None:
            raise RefusedError(place.problem, place=f"{stem.lstrip('/')}.{extension} of {path}")
        row += place.offset, place.size, which
    return row
