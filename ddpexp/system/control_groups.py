"""Find the control groups of this process, in which containers and schedulers limit it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group of this process for a controller, the nearest first, and its version, 1 or 2.

    `root` is the folder that holds /proc and /sys. Source: cgroups(7).
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for top in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from ((folder, 2) for folder in _up(root / top, path))
        elif controller in controllers.split(","):
            yield from ((folder, 1) for folder in _up(root / "sys/fs/cgroup" / controller, path))


def _up(top: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a group and its ancestors."""
    folder = top / path.strip("/")
    # In a container the path may be the host's, which is not visible here: then the top is the container's own group.
    folder = folder if folder.is_dir() else top
    while True:
        yield folder
        if folder == top:
            return
        folder = folder.parent
