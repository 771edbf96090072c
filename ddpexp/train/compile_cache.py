"""The files that torch's compiler keeps between runs, in one folder of a user for all programs.

torch (2.13) trusts whatever it finds there: a library that a killed compiler has half written, or a file that is empty
after a power failure, fails every later run. It does without any file that is missing. So damaged files are removed
before something is compiled. The sizes of complete files are recorded when a run ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpexp.compat.compiler import cache_folder
from ddpexp.system.files import dumps, read_json, write
from ddpexp.system.text import first_few

RECORD = "ddpexp.json"
_LOCKS = "locks"  # torch's, one for each file that takes long to compile
_UNCHECKED = (".gch", ".pch")  # precompiled headers, in which nothing says how long they are
_ELF = (".so", ".o", ".cubin")
_MOST_FILES = 200_000  # where looking would take long


def repair() -> str | None:
    """Remove damaged files before anything is compiled; return a warning if there are any.

    Ranks: one of each machine, while the others wait. Imports the compiler.
    """
    folder = cache_folder()
    try:
        damaged = remove_damaged(folder)
    except OSError:  # the compiler reports it
        return None
    if not damaged:
        return None
    return (
        f"torch.compile: of the files that it keeps in {folder}, {len(damaged)} were not complete, as after a compiler "
        f"was killed. They are removed and compiled again: {first_few(damaged)}"
    )


def record() -> None:
    """Record the sizes of all complete files. Ranks: one of each machine, when nothing is being compiled."""
    with suppress(OSError):  # then less is known of them
        record_sizes(cache_folder())


def remove_damaged(folder: Path) -> list[str]:
    """Remove files that are not complete, or of which that is not known; return the names of the incomplete ones."""
    recorded = _recorded(folder)
    damaged = []
    for file in _files(folder):
        size = recorded.get(file.name)
        if file.is_complete(size) or _is_being_written(folder, file.path):
            continue
        file.path.unlink(missing_ok=True)
        if size is not None or file.path.suffix not in _UNCHECKED:
            damaged.append(file.name)
    return damaged


def record_sizes(folder: Path) -> None:
    """Write the sizes of the complete files in a folder into it. Raises OSError."""
    sizes = {file.name: file.size for file in _files(folder) if file.is_complete(file.size)}
    write(folder / RECORD, dumps(sizes))


@dataclass(frozen=True)
class _File:
    name: str  # relative to the folder
    path: Path
    size: int

    def is_complete(self, recorded: int | None) -> bool:
        """Return whether nothing is missing; `recorded` is the size it had when that was so, None if not known."""
        if self.size == 0 or recorded not in (None, self.size):
            return False
        if self.path.suffix in _ELF:
            return _is_whole_elf(self.path, self.size)
        return recorded is not None or self.path.suffix not in _UNCHECKED


def _files(folder: Path) -> Iterator[_File]:
    """Yield the files that are kept, and not locks and temporary ones."""
    count = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != _LOCKS]
        for name in names:
            count += 1
            if count > _MOST_FILES:
                return
            path = Path(parent, name)
            if name == RECORD or name.endswith((".lock", ".tmp")) or path.is_symlink():
                continue
            with suppress(OSError):  # another program has removed it
                yield _File(str(path.relative_to(folder)), path, path.stat().st_size)


def _recorded(folder: Path) -> Mapping[str, int]:
    try:
        found = read_json(folder / RECORD)
    except (OSError, ValueError):
        return {}
    sizes = found.items() if isinstance(found, dict) else ()
    return {name: size for name, size in sizes if isinstance(size, int)}


def _is_whole_elf(path: Path, size: int) -> bool:
    """Return whether a library ends where its table of sections does, which is written last. Source: elf(5)."""
    try:
        with path.open("rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    order = "<" if header[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", header, 40)
    entry_size, count = struct.unpack_from(f"{order}HH", header, 58)
    end: int = offset + entry_size * count
    return offset > 0 and end <= size


def _is_being_written(folder: Path, path: Path) -> bool:
    """Return whether a program holds the lock under which torch compiles a file."""
    try:
        descriptor = os.open(folder / _LOCKS / f"{path.name.partition('.')[0]}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(descriptor)
    return False
