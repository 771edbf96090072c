"""The files that keys of the data section name. Standard library only, and fast to import."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path

from ddpexp.data.cache import CACHES
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular


@dataclass(frozen=True)
class Source:
    """A file that is read, and by which its cache is found again."""

    key: str  # the override that names it
    path: str
    size: int
    modified: int  # nanoseconds

    @property
    def kind(self) -> str:
        """Return the ending of its name."""
        return Path(self.path).suffix.lower()

    def __str__(self) -> str:
        """Return the key and the path, for messages."""
        return f"{self.key}={self.path}"


def source_of(key: str, path: str, named: str | None = None, may_be_empty: bool = False) -> Source:
    """Return a file as it is now; `named` is the folder or pattern by which the key names it.

    Raises:
        RefusedError: it is missing, empty or cannot be read.
    """
    full = os.path.abspath(os.path.expanduser(path))
    try:
        with open_regular(full) as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        seen_from = "" if os.path.isabs(os.path.expanduser(path)) else f" in the folder {os.getcwd()}"
        raise RefusedError(
            f"cannot be read{seen_from}: {error.strerror}",
            key=key,
            value=named or path,
            place=path if named not in (None, path) else None,
        ) from None
    if status.st_size == 0 and not may_be_empty:
        raise RefusedError("is empty", key=key, value=named or path, suggestion="Name a file with data.")
    return Source(key, full, status.st_size, status.st_mtime_ns)


def files_matching(path: str, ending: str = "") -> list[str]:
    """Return the files that a path, a folder (those in it that end so) or a pattern names, in the order of their names.

    A path that is no pattern need not exist.
    """
    full = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(full):
        found = [str(file) for file in Path(full).rglob(f"*{ending}") if CACHES not in file.parts]
    elif glob.has_magic(full) and not os.path.exists(full):
        found = glob.glob(full, recursive=True)
    else:
        return [full]
    return sorted(file for file in found if not os.path.isdir(file))


def is_value_file(name: str | None) -> bool:
    """Return whether a key that may name a column names a file with a value for each sample."""
    return name is not None and name.endswith((".npy", ".txt", ".csv"))
