"""The four IDX files of MNIST: where they may lie, and what each must hold."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddpexp.data.folders import Stamp
from ddpexp.data.mirrors import WrongError, is_web_page
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: its name, its name in the cache, and what it must hold once unpacked."""

    name: str
    cached: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def header(self) -> bytes:
        """The IDX header: the magic number (bytes, so many dimensions), then each dimension."""
        return struct.pack(f">{1 + len(self.shape)}I", 0x0800 + len(self.shape), *self.shape)

    @property
    def size(self) -> int:
        """Size of the unpacked file.

        Units: bytes.
        """
        return len(self.header) + math.prod(self.shape)

    @property
    def remote_name(self) -> str:
        """Return its name at every mirror."""
        return f"{self.name}.gz"

    @property
    def most_bytes(self) -> int:
        """Return the most that a mirror may send: packing does not make a file larger."""
        return self.size

    def read(self, stream: BinaryIO) -> Content:
        """Return what it holds, unpacked. Raises: WrongError."""
        return Content(self, unpack(stream, self))


# Source: the SHA-256 of the unpacked files of Yann LeCun's MNIST.
FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        "train-images.npy",
        (60_000, 28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        "train-labels.npy",
        (60_000,),
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        "test-images.npy",
        (10_000, 28, 28),
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        "test-labels.npy",
        (10_000,),
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)


@dataclass(frozen=True)
class Content:
    """What one file holds, unpacked."""

    file: IdxFile
    unpacked: bytes


def find(bases: Sequence[Path]) -> dict[str, Path]:
    """Find the files by any of their usual names, in the folders and where torchvision keeps them below."""
    found: dict[str, Path] = {}
    folders = [folder for base in bases for folder in (base, base / "MNIST" / "raw", base / "raw")]
    for file in FILES:
        names = [f"{name}{end}" for name in (file.name, file.name.replace("-idx", ".idx")) for end in ("", ".gz")]
        for path in (folder / name for folder in folders for name in names):
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
            found[file.name] = path
            break
    return found


def load(path: Path, file: IdxFile) -> tuple[Content, Stamp]:
    """Read one file, whole and checked."""
    try:
        with open_regular(path) as stream:
            stamp = Stamp.of(str(path), os.fstat(stream.fileno()))
            return Content(file, unpack(stream, file)), stamp
    except WrongError as error:
        raise RefusedError(
            f"{error}, and training on it would not be training on MNIST",
            suggestion=f"Replace it with the original {file.name}, or delete it and set data.source=download.",
            place=path,
        ) from None
    except OSError as error:
        raise RefusedError(
            f"cannot be read ({error.strerror})", suggestion="Make it readable or replace it.", place=path
        ) from None


def unpack(stream: BinaryIO, file: IdxFile) -> bytes:
    """Read the unpacked content, never more than one chunk beyond the right size, and check it.

    Whether it is packed shows in its first bytes; the name may lie, as some browsers unpack what they save.

    Raises: WrongError.
    """
    start = stream.read(256)
    stream.seek(0)
    if not start:
        raise WrongError("is empty")
    if is_web_page(start):
        raise WrongError(f"is a web page (it begins with {start[:20]!r}), not data")
    packed = start.startswith(b"\x1f\x8b")
    reader: BinaryIO = gzip.GzipFile(fileobj=stream) if packed else stream  # type: ignore[assignment]
    content = bytearray()
    try:
        while len(content) <= file.size and (chunk := reader.read(1 << 20)):
            content += chunk
    except EOFError:
        raise WrongError(f"is cut off: its gzip data ends before the {file.size:,} bytes it must unpack to") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise WrongError(f"is damaged: its gzip data cannot be unpacked ({error})") from None
    magic = file.header[:4]
    if len(content) >= 4 and content[:4] != magic:
        raise WrongError(
            f"begins with the magic number {int.from_bytes(content[:4], 'big')}, not {int.from_bytes(magic, 'big')}"
        )
    unpacked = " once unpacked" if packed else ""
    if len(content) != file.size:
        found = f"more than {file.size:,}" if len(content) > file.size else f"{len(content):,}"
        raise WrongError(f"has {found} bytes{unpacked}, not {file.size:,}")
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != file.sha256:
        raise WrongError(f"has the right size but the SHA-256 {sha256}{unpacked}, not {file.sha256}")
    return bytes(content)
