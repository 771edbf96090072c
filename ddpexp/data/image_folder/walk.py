"""Walking through folders of images: links are followed, and what is no image by its name is counted.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ddpexp.errors import RefusedError

SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
)  # fmt: skip
_IMAGES = frozenset(SUFFIXES)


@dataclass(frozen=True)
class ImageFile:
    """One image: its path below `data.root`, its class, and what changes when its content does."""

    path: str
    label: int
    num_bytes: int
    modified: int  # nanoseconds


@dataclass
class Walk:
    """A walk through the folders of a data set."""

    root: Path
    left_out: Counter[str] = field(default_factory=Counter)  # files that are no images by their names, by suffix
    _seen: dict[tuple[int, int], str] = field(default_factory=dict)  # the folders of this part, by device and inode

    def begin_part(self, above: Path) -> None:
        """Begin another part, which may be the same folders; no link may lead to what is `above` its folders."""
        self._seen.clear()
        for place in {above, *above.parents, *Path(os.path.realpath(above)).parents}:
            self._seen[_identity(place)] = str(place)

    def images(self, place: Path, label: int) -> Iterator[ImageFile]:
        """Yield the images in a folder and in the folders below it, sorted by name.

        Raises:
            RefusedError: a link leads to a folder that is read anyway. OSError: something cannot be read.
        """
        self._enter(str(place))
        with os.scandir(place) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from self.images(Path(entry.path), label)
            elif is_image(entry.name):
                found_stat = entry.stat()
                path = os.path.relpath(entry.path, self.root)
                yield ImageFile(path, label, found_stat.st_size, found_stat.st_mtime_ns)
            else:
                self.left_out[_suffix(entry.name) or "without a suffix"] += 1

    def _enter(self, place: str) -> None:
        """Note a folder, so that no link leads to it again: in a circle, or to the folder of another class."""
        other = self._seen.setdefault(_identity(place), place)
        if other != place:
            raise RefusedError(
                f"is the same folder as {other}, and images would be read twice",
                key="data.root",
                value=self.root,
                suggestion="Remove the link.",
                place=place,
            )


def is_image(name: str) -> bool:
    """Return whether a file is an image by its name."""
    return _suffix(name) in _IMAGES


def folders(place: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones. Raises: OSError."""
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _identity(place: str | Path) -> tuple[int, int]:
    status = os.stat(place)
    return status.st_dev, status.st_ino


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()
