"""Where the files of a downloaded data set are kept, and whether they have changed since they were checked.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.data.cache import put
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.terminal import print_message


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


def data_folder(root: str | None, files: str, source: str) -> Path:
    """Return the absolute path of the data folder; it may not exist, but is not anything else.

    With `source` auto a folder that `root` names has to exist: a mistyped path would otherwise train on a stand-in.
    `files` names for messages what the folder is to hold. Raises: RefusedError.
    """
    if root is None:
        variable = os.environ.get("DDPEXP_DATA", "")
        folder = Path(os.path.abspath(os.path.expanduser(variable))) if variable else user_cache()
    elif not root or "\0" in root:
        raise RefusedError(
            "names no folder", key="data.root", value=root, suggestion=f"Set data.root to the folder with {files}."
        )
    else:
        folder = Path(os.path.abspath(os.path.expanduser(root)))
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise RefusedError(
                "is not a folder",
                key="data.root",
                value=folder,
                suggestion=f"Set data.root to the folder with {files}.",
            )
    except FileNotFoundError:
        if root is not None and source == "auto":
            raise RefusedError(
                "does not exist",
                key="data.root",
                value=folder,
                suggestion=f"Set data.root to the folder with {files}, or set data.source=download to "
                "download to a new folder.",
            ) from None
    except OSError as error:
        raise RefusedError(
            f"cannot be used ({error.strerror})", key="data.root", value=folder, suggestion="Set data.root to a folder."
        ) from None
    return folder


def bases_of(root: Path) -> list[Path]:
    """Return the folders that may hold files and caches, the data folder first."""
    return [root, user_cache()]


def unchanged(record: Mapping[str, Any]) -> bool:
    """Return whether every source file of a cache is unchanged since it was checked."""
    try:
        return all(vars(Stamp.of(stamp["path"], os.stat(stamp["path"]))) == stamp for stamp in record["stamps"])
    except (OSError, KeyError, TypeError):
        return False


def store(name: str, content: bytes, base: Path) -> Stamp:
    """Keep a downloaded file.

    Raises: OSError.
    """
    target = base / name
    put(base, target, content)
    return Stamp.of(str(target), os.stat(target))


def joint_hash(hashes: Sequence[str]) -> str:
    """Return one hash of several."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def to_stderr(text: str) -> None:
    """Print a warning."""
    print_message(f"WARNING: {text}")
