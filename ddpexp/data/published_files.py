"""The files of a published data set: where they may lie, and what each must hold.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular


class WrongError(Exception):
    """A file has the wrong content; the text continues the sentence that begins with the file's name."""


@dataclass(frozen=True)
class Stamp:
    """A source file as it was when it was checked: while the stamp fits, the check need not be repeated."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Stamp:
        """Take the stamp from a file's status."""
        return cls(path, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class PublishedFile:
    """A file of a published data set, and what it must hold, once unpacked if it may be packed. Units: size bytes."""

    name: str
    remote_name: str  # at every mirror
    size: int  # packing does not make a file larger: no mirror may send more
    sha256: str
    places: Sequence[str]  # paths below a folder where it may lie
    magic: bytes = b""  # it begins with these
    may_be_packed: bool = False  # by gzip

    def find(self, folders: Iterable[Path]) -> Path | None:
        """Return the first of its places that exists. Raises: RefusedError, if that is no regular file."""
        for path in (folder / place for folder in folders for place in self.places):
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

    def load(self, path: Path, title: str) -> tuple[bytes, Stamp]:
        """Read the file, whole and checked; `title` is that of the data set. Raises: RefusedError."""
        try:
            with open_regular(path) as stream:
                stamp = Stamp.of(str(path), os.fstat(stream.fileno()))
                return self.read(stream), stamp
        except WrongError as error:
            raise RefusedError(
                f"{error}, and training on it would not be training on {title}",
                suggestion=f"Replace it with the original {self.name}, or delete it and set data.source=download.",
                place=path,
            ) from None
        except OSError as error:
            raise RefusedError(
                f"cannot be read ({error.strerror})", suggestion="Make it readable or replace it.", place=path
            ) from None

    def read(self, stream: BinaryIO) -> bytes:
        """Return the checked content, unpacked; never read more than one chunk beyond the right size.

        Whether it is packed shows in its first bytes; the name may lie, as some browsers unpack what they save.

        Raises: WrongError.
        """
        start = stream.read(256)
        stream.seek(0)
        if not start:
            raise WrongError("is empty")
        if is_web_page(start):
            raise WrongError(f"is a web page (it begins with {start[:20]!r}), not data")
        packed = self.may_be_packed and start.startswith(b"\x1f\x8b")
        reader: BinaryIO = gzip.GzipFile(fileobj=stream) if packed else stream  # type: ignore[assignment]
        content = bytearray()
        try:
            while len(content) <= self.size and (chunk := reader.read(1 << 20)):
                content += chunk
        except EOFError:
            raise WrongError(
                f"is cut off: its gzip data ends before the {self.size:,} bytes it must unpack to"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise WrongError(f"is damaged: its gzip data cannot be unpacked ({error})") from None
        if len(content) >= len(self.magic) and not content.startswith(self.magic):
            found, expected = (int.from_bytes(one[: len(self.magic)], "big") for one in (content, self.magic))
            raise WrongError(f"begins with the magic number {found}, not {expected}")
        unpacked = " once unpacked" if packed else ""
        if len(content) != self.size:
            length = f"more than {self.size:,}" if len(content) > self.size else f"{len(content):,}"
            raise WrongError(f"has {length} bytes{unpacked}, not {self.size:,}")
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.sha256:
            raise WrongError(f"has the right size but the SHA-256 {sha256}{unpacked}, not {self.sha256}")
        return bytes(content)


def is_web_page(start: bytes) -> bool:
    """Say whether a content begins as HTML or XML does: what a network hands out in place of a file."""
    return start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")
