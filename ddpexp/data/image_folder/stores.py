"""Where the pixels of an image come from: a cache of pixels or of files that is mapped into memory, or the files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.image_folder.decode import BrokenImageError, decode
from ddpexp.data.image_folder.options import StoredSize
from ddpexp.errors import LoaderError

Pixels = NDArray[np.uint8]


class Images(Protocol):
    """Images by their indices."""

    def shapes(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return height and width of images. Shapes: (n,) to (n, 2)."""
        ...

    def name(self, sample: int) -> str:
        """Return what an image is called."""
        ...

    def image(self, sample: int) -> Pixels:
        """Return an image. Shapes: (height, width, channels). Raises: LoaderError."""
        ...


@dataclass(frozen=True)
class Store:
    """The images of a part as stored by `ddpexp.data.image_folder.prepare`, shared by all processes of a node.

    Shapes: table (num_images, 4) int64: offset, height, width, bytes.
    """

    kind: str  # raw, jpeg or none
    root: Path
    content: Pixels | None
    table: NDArray[np.int64]
    name_ends: NDArray[np.int64]
    names: Pixels
    stored: StoredSize
    channels: int

    def shapes(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return height and width of images. Shapes: (n,) to (n, 2)."""
        return self.table[samples, 1:3]

    def name(self, sample: int) -> str:
        """Return the path of an image below data.root."""
        begin = int(self.name_ends[sample - 1]) if sample else 0
        return os.fsdecode(self.names[begin : int(self.name_ends[sample])].tobytes())

    def image(self, sample: int) -> Pixels:
        """Return an image. Shapes: (height, width, channels).

        Raises:
            LoaderError: its file is gone or has changed since the preparation.
        """
        offset, height, width, length = self.table[sample].tolist()
        if self.kind == "raw" and self.content is not None:
            return self.content[offset : offset + length].reshape(height, width, self.channels)
        try:
            if self.content is not None:
                decoded = decode(self.content[offset : offset + length].tobytes(), self.stored, self.channels)
            else:
                decoded = decode(str(self.root / self.name(sample)), self.stored, self.channels)
        except (BrokenImageError, OSError) as error:
            raise LoaderError(
                f"{self.root / self.name(sample)} cannot be read any more ({error}): the images must stay as they "
                "were when the run started."
            ) from None
        pixels: Pixels = np.asarray(decoded).reshape(decoded.height, decoded.width, self.channels)
        if pixels.shape[:2] != (height, width):
            raise LoaderError(
                f"{self.root / self.name(sample)} is another image than when the run started: start a new run."
            )
        return pixels


def open_store(folder: Path, part: str, prepared: Any) -> tuple[Store, NDArray[np.int64]]:
    """Map a part of a cache; return it with the labels."""

    def mapped(name: str) -> NDArray[np.int64]:
        return np.asarray(np.load(folder / f"{part}-{name}.npy", mmap_mode="r"))

    content = folder / f"{part}.bin"
    store = Store(
        kind=prepared["cache"],
        root=Path(prepared["root"]),
        content=_bytes(content) if prepared["cache"] != "none" else None,
        table=mapped("index"),
        name_ends=mapped("name-ends"),
        names=_bytes(folder / f"{part}-names.bin"),
        stored=StoredSize(*prepared["stored"]),
        channels=prepared["channels"],
    )
    return store, mapped("labels")


def _bytes(path: Path) -> Pixels:
    # As a plain array: slices of a memmap cost several microseconds.
    return np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.zeros(0, np.uint8)
