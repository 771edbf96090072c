"""What killed processes leave in shared memory: torch names a piece of it for the moment until it is mapped."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddpexp.system.process import is_gone

_FOLDER = Path("/dev/shm")
_NAME = re.compile(
    r"torch_(\d+)_\d+_\d+"
)  # with the process that made it. Source: torch's MapAllocator, NewProcessWideShmHandle
_DYING_SECONDS = 0.5  # for DataLoader workers, whose rank is gone, to go too


def clear(since: float, folder: Path = _FOLDER) -> None:
    """Remove what processes that are gone have made and not passed on. Units: `since` in seconds since 1970.

    It may be somebody else's that cannot be told from ours by its name: what is older, another user's, of a living
    process or mapped by one stays.
    """
    deadline = time.monotonic() + _DYING_SECONDS
    while found := dict(_made(since, folder)):
        gone = [path for path, pid in found.items() if is_gone(pid)]
        mapped = _mapped(folder) if gone else ""
        for path in gone:
            if str(path) not in mapped:
                with suppress(OSError):
                    path.unlink()
        if len(gone) == len(found) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _made(since: float, folder: Path) -> Iterator[tuple[Path, int]]:
    with suppress(OSError):
        for entry in os.scandir(folder):
            name = _NAME.fullmatch(entry.name)
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if name is not None and status.st_uid == os.getuid() and status.st_ctime >= since:
                    yield Path(entry.path), int(name[1])


def _mapped(folder: Path) -> str:
    """Return what living processes have mapped, as far as this one may see it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found += [line for line in entry.read_text(errors="replace").splitlines() if str(folder) in line]
    return "\n".join(found)
