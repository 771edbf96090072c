"""Remove shared memory files left behind by killed processes: torch's, NCCL's and CUDA's have a name for a while."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddpexp.system.containers import HOST_PID_NAMESPACE, pid_namespace, sees_owners_of_shared_memory
from ddpexp.system.process import is_gone

_FOLDER = Path("/dev/shm")
# The number is the creating process. Source: torch's MapAllocator, NewProcessWideShmHandle
_OF_TORCH = re.compile(r"torch_(?P<pid>\d+)_\d+_\d+")
# The user, the creating process, both in hexadecimal digits, and a count. CUDA's, for memory shared between processes.
_OF_CUDA = re.compile(r"cuda\.shm\.[0-9a-f]+\.(?P<hex>[0-9a-f]+)\.[0-9a-f]+")
# No process in the name; removed by NCCL once the last rank has opened it. Its sockets are abstract: they leave no
# file. Source: NCCL's src/misc/shmutils.cc and src/misc/ipcsocket.cc; `nccl-shm-...` before 2.12.
_OF_NCCL = re.compile(r"nccl-([A-Za-z0-9]{6}|shm-[a-z]+-[0-9a-f]+(-\d+)+)")
_DYING_SECONDS = 0.5  # for DataLoader workers to end after their rank


def clear(since: float, folder: Path = _FOLDER, of_gpus: bool = False) -> None:
    """Remove files of processes that are gone and never passed them on. Units: `since` in seconds since 1970.

    `of_gpus`: those of NCCL and CUDA too.

    Their names do not identify the run, so everything older, of another user, of a living process, or open in one is
    kept. So is everything where the process IDs in the names are of other namespaces. A process in another container
    that shares the folder is not visible: there NCCL's files, of which only that would tell, are kept.
    """
    if folder == _FOLDER and not sees_owners_of_shared_memory():
        return
    deadline = time.monotonic() + _DYING_SECONDS
    nccl = of_gpus and _sees_all_processes()
    while files := dict(_created_since(since, folder, of_gpus, nccl)):
        gone = [path for path, pid in files.items() if pid is None or is_gone(pid)]
        used = _used(folder) if gone else set()
        for path in gone:
            if str(path) not in used:
                with suppress(OSError):
                    path.unlink()
        gone = [path for path in gone if files[path] is not None or str(path) not in used]
        if len(gone) == len(files) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _created_since(since: float, folder: Path, of_gpus: bool, nccl: bool) -> Iterator[tuple[Path, int | None]]:
    """Yield the files and the processes that created them, None where the name does not contain it."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            creator = _creator(entry.name, of_gpus, nccl)
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if creator != 0 and status.st_uid == os.getuid() and status.st_ctime >= since:
                    yield Path(entry.path), creator


def _creator(name: str, of_gpus: bool, nccl: bool) -> int | None:
    """Return the process that created a file, from its name: None if it does not contain it, 0 if it is another's."""
    if found := _OF_TORCH.fullmatch(name):
        return int(found["pid"])
    if of_gpus and (found := _OF_CUDA.fullmatch(name)):
        return int(found["hex"], 16)
    return None if nccl and _OF_NCCL.fullmatch(name) else 0


def _used(folder: Path) -> set[str]:
    """Return the files in the folder that a visible process has mapped or open."""
    paths: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            paths |= {line.split(maxsplit=5)[5] for line in lines if str(folder) in line}
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):  # closed since it was listed
                    paths.add(os.readlink(link))
    return paths


def _sees_all_processes() -> bool:
    """Return whether /proc shows all processes of the host: false in a container with process numbers of its own."""
    return pid_namespace() == HOST_PID_NAMESPACE
