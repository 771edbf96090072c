"""Data sets that others have published: found or downloaded, and decoded once into memory-mappable `.npy` files.

The rules, in the order they apply:

- A file that exists but is wrong is always refused; nothing replaces it.
- `files` uses existing files. `download` fetches missing ones. `auto` does the same, and only if none of the files
  exists and no download succeeds does it fall back to drawn images, with a warning.
- A `root` that is given has no stand-in: what is drawn replaces only what nobody has named.
- All content is checked against its SHA-256 before it is used, so the cache is named by its content.
- The cache is in the data folder if that can be written, otherwise in the user's cache folder.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.data.cache import CACHES, Cache, in_first, make_cache, put, read_cache, update_cache
from ddpexp.data.mirrors import (
    AUTO_PATIENCE,
    DOWNLOAD_PATIENCE,
    DownloadError,
    Patience,
    alone,
    download_unless_failed,
)
from ddpexp.data.npy import write_npy
from ddpexp.data.published_files import PublishedFile, Stamp, WrongError
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted

_SEEDS = (1, 2)  # of the drawn images to train on and to test with


@dataclass(frozen=True)
class LabeledImages:
    """Images as stored, and a byte for the class of each."""

    pixels: bytes | memoryview
    labels: bytes | memoryview


@dataclass(frozen=True)
class StandIn:
    """Drawn images in place of a published data set.

    `draw` is called with a number of images and a seed, and returns them with the hashes of their pixels and labels.
    """

    name: str
    title: str
    cache: str  # the beginning of the names of caches, with the version of what draws
    classes: Sequence[str]
    draw: Callable[[int, int], tuple[LabeledImages, Sequence[str]]]


@dataclass(frozen=True)
class Published:
    """A published data set of images of one size."""

    name: str
    title: str
    files: Sequence[PublishedFile]
    sha256: str
    unpack: Callable[[Sequence[bytes]], tuple[LabeledImages, LabeledImages]]  # of the files; raises WrongError
    shape: tuple[int, ...]  # of an image as stored
    mean: Sequence[float]  # of the training images, as fractions of 255
    std: Sequence[float]
    classes: Sequence[str]
    stand_in: StandIn
    space: str  # how much a cache takes, for messages
    patience: tuple[Patience, Patience] = (AUTO_PATIENCE, DOWNLOAD_PATIENCE)  # with source=auto, and with others
    hint: str = ""  # where and how the files may lie, for messages
    patch_moments: Callable[[bytes | memoryview], Any] | None = None  # a further fact, of the training pixels

    def prepare(
        self,
        root: str | None,
        source: str,
        num_drawn: tuple[int, int],
        mirrors: Sequence[str],
        patience: Patience | None,
    ) -> dict[str, Any]:
        """Make sure that a decoded cache exists; return a description of the data.

        `root` None stands for `$DDPEXP_DATA`, else for the user's cache folder. `num_drawn` images to train on and to
        test with are drawn where the data set is not used, with a warning on stderr if they replace it. They do not
        replace it where a `root` is given, nor where `$DDPEXP_DATA` names no folder.

        The result is JSON: name, source, folder (absolute), sha256 (of the files), num_train, num_test, note (a phrase
        for people), mean and std of the pixels, facts (which a configuration may refer to).

        Raises: RefusedError, if the data or a folder is invalid.
        """
        if source == "embedded":
            if root is not None:
                self.folder(root, source)
            return self._drawn(num_drawn)
        folder = self.folder(root, source)
        is_named = root is not None or (bool(os.environ.get("DDPEXP_DATA")) and not folder.is_dir())
        must_be_real = is_named or source != "auto"
        try:
            patience = patience or self.patience[source != "auto"]
            return self._real(folder, source, mirrors, patience, tries_again=must_be_real)
        except DownloadError as error:
            failed = f"they could not be downloaded ({error})"
            if must_be_real:
                raise RefusedError(
                    f"holds none of the files of {self.title}, and {failed}, so there is nothing to train on",
                    **_named(root, folder),
                    suggestion=f"Put {self.listed} into that folder, or check the network, or set data.source=embedded "
                    f"for {self.stand_in.title}.",
                ) from None
            print_message(
                f"WARNING: THIS IS NOT {self.title}: data.root={folder} holds none of its files and {failed}, so "
                f"{num_drawn[0]:,} + {num_drawn[1]:,} {self.stand_in.title} stand in and no accuracy is comparable "
                f"with {self.title}; for the real data put {self.listed} into that folder or set data.source=download, "
                f"and set data.source=embedded if {self.stand_in.title} are what you want"
            )
            return self._drawn(num_drawn)

    def folder(self, root: str | None, source: str) -> Path:
        """Return the absolute path of the data folder; it may not exist, but is not anything else.

        A folder that `root` names has to exist, unless `source` is download: a mistyped path would otherwise be filled
        by one, or ignored.

        Raises: RefusedError.
        """
        advice = f"Set data.root to the folder with {self.listed}"
        if root is not None and (not root or "\0" in root):
            raise RefusedError("names no folder", key="data.root", value=root, suggestion=f"{advice}.")
        named = root or os.environ.get("DDPEXP_DATA") or str(user_cache())
        folder = Path(os.path.abspath(os.path.expanduser(named)))
        try:
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise RefusedError("is not a folder", **_named(root, folder), suggestion=f"{advice}.")
        except FileNotFoundError:
            if root is not None and source != "download":
                instead = "leave it out: data.source=embedded reads no files"
                if source != "embedded":
                    instead = "set data.source=download to download to a new folder"
                raise RefusedError(
                    "does not exist", key="data.root", value=folder, suggestion=f"{advice}, or {instead}."
                ) from None
        except OSError as error:
            raise RefusedError(
                f"cannot be used ({error.strerror})", **_named(root, folder), suggestion=f"{advice}."
            ) from None
        return folder

    def is_in(self, folder: Path) -> bool:
        """Return whether a folder holds a file of the data set, or a cache of it."""
        return bool(self._found([folder]) or self._caches([folder]))

    @property
    def listed(self) -> str:
        """The names of the files, for messages."""
        return ", ".join(file.name for file in self.files)

    def _real(
        self, root: Path, source: str, mirrors: Sequence[str], patience: Patience, tries_again: bool
    ) -> dict[str, Any]:
        """Get the data set from the cache, the files or the network, in this order.

        If several commands run at the same time, one of them downloads. `tries_again`: also shortly after a failure.

        Raises: DownloadError, if none of the files exists and they could not be downloaded.
        """
        described = self._local(root, source)
        if described is None:
            with alone(patience.total):
                described = self._local(root, source) or self._downloaded(root, source, mirrors, patience, tries_again)
        return described

    def _local(self, root: Path, source: str) -> dict[str, Any] | None:
        """Get the data set from the cache or the files; None if something must be downloaded."""
        bases = [root, user_cache()]
        caches = self._caches(bases)
        for cache in caches:
            if cache.record.get("root") == str(root) and _is_unchanged(cache.record):
                return self._described_real(cache, source)
        found = self._found(bases if source != "files" else [root])
        missing = [file for file in self.files if file.name not in found]
        if source == "files" and missing:
            raise self._missing(root, missing, suggestion=" Or set data.source=download to fetch what is missing.")
        if not found and caches:  # checked once, and complete: the files themselves are no longer needed
            return self._described_real(caches[0], source)
        if missing:
            return None
        return self._decoded(root, source, "files", self._loaded(found))

    def _downloaded(
        self, root: Path, source: str, mirrors: Sequence[str], patience: Patience, tries_again: bool
    ) -> dict[str, Any]:
        """Download what is missing. Raises: DownloadError, if none of the files exists."""
        bases = [root, user_cache()]
        found = self._found(bases)
        missing = [file for file in self.files if file.name not in found]
        loaded = self._loaded(found)

        try:
            received = download_unless_failed(missing, mirrors, patience, tries_again, self.name)
        except DownloadError as error:
            if not found:
                raise
            raise self._missing(root, missing, f", and they could not be downloaded either ({error})") from None
        for file, content, packed in received:
            stamp = in_first(bases, functools.partial(_store, file.remote_name, packed), self.space)
            loaded[file.name] = content, stamp
        return self._decoded(root, source, "download", loaded)

    def _decoded(self, root: Path, source: str, way: str, loaded: Mapping[str, tuple[bytes, Stamp]]) -> dict[str, Any]:
        """Write the checked contents to a cache, unless one contains them already."""
        contents, stamps = zip(*(loaded[file.name] for file in self.files), strict=True)
        record = {
            "name": self.name,
            "source": way,
            "sha256": self.sha256,
            "root": str(root),
            "stamps": [vars(stamp) for stamp in stamps],
        }
        bases = [root, user_cache()]
        if caches := self._caches(bases):
            return self._described_real(update_cache(caches[0], record), source)
        try:
            parts = self.unpack(contents)
        except WrongError as error:
            raise RefusedError(
                str(error), suggestion=f"Replace it with the original {self.listed}.", place=stamps[0].path
            ) from None
        cache = make_cache(bases, self._cache_name, lambda folder: {**record, **self._write(folder, parts)}, self.space)
        return self._described_real(cache, source)

    def _drawn(self, numbers: tuple[int, int]) -> dict[str, Any]:
        """Get the drawn images from the cache, or draw them."""
        stand_in = self.stand_in

        def fill(folder: Path) -> dict[str, Any]:
            drawn = [stand_in.draw(number, seed) for number, seed in zip(numbers, _SEEDS, strict=True)]
            sha256 = joint_hash([one for _, hashes in drawn for one in hashes])
            return {"name": stand_in.name, "sha256": sha256, **self._write(folder, [part for part, _ in drawn])}

        cache = make_cache([user_cache()], f"{stand_in.cache}-{numbers[0]}-{numbers[1]}", fill, self.space)
        title = f"{stand_in.title} (NOT {self.title})"
        return self._described(cache, "embedded", title, "embedded in ddpexp", stand_in.classes)

    def _write(self, folder: Path, parts: Sequence[LabeledImages]) -> dict[str, Any]:
        """Write the arrays of both parts to the folder of a cache; return what it records of them. Raises: OSError."""
        train, test = parts
        for part, content in (("train", train), ("test", test)):
            for what, shape, values in (("images", self.shape, content.pixels), ("labels", (), content.labels)):
                path = folder / f"{part}-{what}.npy"
                path.unlink(missing_ok=True)  # of a command that was killed
                write_npy(path, (len(content.labels), *shape), values)
        record: dict[str, Any] = {"num_train": len(train.labels), "num_test": len(test.labels)}
        if self.patch_moments is not None:
            record["patch_moments"] = self.patch_moments(train.pixels)
        return record

    def _found(self, folders: Sequence[Path]) -> dict[str, Path]:
        """Return the files that are in the folders, by their names."""
        return {file.name: path for file in self.files if (path := file.find(folders)) is not None}

    def _loaded(self, found: Mapping[str, Path]) -> dict[str, tuple[bytes, Stamp]]:
        return {file.name: file.load(found[file.name], self.title) for file in self.files if file.name in found}

    def _caches(self, bases: Sequence[Path]) -> list[Cache]:
        return [cache for base in bases if (cache := read_cache(base / CACHES / self._cache_name))]

    @property
    def _cache_name(self) -> str:
        return f"{self.name}-{self.sha256[:12]}"

    def _missing(
        self, root: Path, missing: Sequence[PublishedFile], problem: str = "", suggestion: str = ""
    ) -> RefusedError:
        names = ", ".join(file.name for file in missing)
        return RefusedError(
            f"holds {len(self.files) - len(missing)} of {counted(len(self.files), 'file')} of {self.title}, and "
            f"training needs {names}{problem}",
            key="data.root",
            value=root,
            suggestion=f"Add what is missing there{self.hint}.{suggestion}",
        )

    def _described_real(self, cache: Cache, source: str) -> dict[str, Any]:
        origin = "files" if source == "files" else cache.record["source"]
        folders = ", ".join(dict.fromkeys(os.path.dirname(stamp["path"]) for stamp in cache.record["stamps"]))
        way = "from files in" if origin == "files" else "downloaded to"
        return self._described(cache, origin, self.title, f"{way} {folders}", self.classes)

    def _described(self, cache: Cache, source: str, title: str, way: str, classes: Sequence[str]) -> dict[str, Any]:
        record = cache.record
        mean, std = list(self.mean), list(self.std)
        facts = {
            "num_classes": len(classes),
            "classes": list(classes),
            "shape": [len(mean), *self.shape[-2:]],
            "mean": mean,
            "std": std,
        }
        if self.patch_moments is not None:
            facts["patch_moments"] = record["patch_moments"]
        return {
            "name": record["name"],
            "source": source,
            "folder": str(cache.folder),
            "sha256": record["sha256"],
            "num_train": record["num_train"],
            "num_test": record["num_test"],
            "note": f"{title}, {record['num_train']:,} + {record['num_test']:,} images, {way}",
            "mean": mean,
            "std": std,
            "facts": facts,
        }


def _named(root: str | None, folder: Path) -> dict[str, Any]:
    """Return the fields of an error about the data folder: by what it is named, if that is not the default."""
    if root is None and os.environ.get("DDPEXP_DATA"):
        return {"place": f"$DDPEXP_DATA={folder}"}
    return {"key": "data.root", "value": folder}


def joint_hash(hashes: Sequence[str]) -> str:
    """Return one hash of several."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _is_unchanged(record: Mapping[str, Any]) -> bool:
    """Return whether every source file of a cache is unchanged since it was checked."""
    try:
        return all(vars(Stamp.of(stamp["path"], os.stat(stamp["path"]))) == stamp for stamp in record["stamps"])
    except (OSError, KeyError, TypeError):
        return False


def _store(name: str, content: bytes, base: Path) -> Stamp:
    """Keep a downloaded file. Raises: OSError."""
    target = base / name
    put(base, target, content)
    return Stamp.of(str(target), os.stat(target))
