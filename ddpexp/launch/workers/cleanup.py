"""Remove shared memory files left behind by killed processes: torch's have a name until they are mapped."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddpexp.system.containers import sees_owners_of_shared_memory
from ddpexp.system.process import is_gone

_FOLDER = Path("/dev/shm")
# The first number is the creating process. Source: torch's MapAllocator, NewProcessWideShmHandle
_NAME = re.compile(r"torch_(\d+)_\d+_\d+")
_DYING_SECONDS = 0.5  # for DataLoader workers to end after their rank


def clear(since: float, folder: Path = _FOLDER) -> None:
    """Remove files of processes that are gone and never passed them on. Units: `since` in seconds since 1970.

    Their names do not identify the run, so everything older, of another user, of a living process, or mapped by one is
    kept. So is everything where the process IDs in the names are of other namespaces.
    """
    if folder == _FOLDER and not sees_owners_of_shared_memory():
        return
    deadline = time.monotonic() + _DYING_SECONDS
    while files := dict(_created_since(since, folder)):
        gone = [path for path, pid in files.items() if is_gone(pid)]
        mapped = _mapped(folder) if gone else ""
        for path in gone:
            if str(path) not in mapped:
                with suppress(OSError):
                    path.unlink()
        if len(gone) == len(files) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _created_since(since: float, folder: Path) -> Iterator[tuple[Path, int]]:
    with suppress(OSError):
        for entry in os.scandir(folder):
            name = _NAME.fullmatch(entry.name)
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if name is not None and status.st_uid == os.getuid() and status.st_ctime >= since:
                    yield Path(entry.path), int(name[1])


def _mapped(folder: Path) -> str:
    """Return the lines of all visible /proc/PID/maps that are about files in the folder."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines += [line for line in entry.read_text(errors="replace").splitlines() if str(folder) in line]
    return "\n".join(lines)
