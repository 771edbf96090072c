"""The four IDX files of MNIST."""

from __future__ import annotations

import math
import struct

from ddpexp.data.published_files import PublishedFile

HINT = ", each with or without .gz, or into MNIST/raw or raw"


def header(shape: tuple[int, ...]) -> bytes:
    """Return an IDX header: the magic number (bytes, so many dimensions), then each dimension."""
    return struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)


def idx_file(name: str, shape: tuple[int, ...], sha256: str) -> PublishedFile:
    """Return a file by what it holds once unpacked; it is found by any of its usual names, as torchvision keeps it."""
    names = [f"{one}{end}" for one in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    places = [f"{below}{one}" for below in ("", "MNIST/raw/", "raw/") for one in names]
    start = header(shape)
    size = len(start) + math.prod(shape)
    return PublishedFile(name, f"{name}.gz", size, sha256, places, magic=start[:4], may_be_packed=True)


# Source: the SHA-256 of the unpacked files of Yann LeCun's MNIST.
FILES = (
    idx_file(
        "train-images-idx3-ubyte",
        (60_000, 28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    idx_file(
        "train-labels-idx1-ubyte",
        (60_000,),
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    idx_file(
        "t10k-images-idx3-ubyte",
        (10_000, 28, 28),
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    idx_file(
        "t10k-labels-idx1-ubyte",
        (10_000,),
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
