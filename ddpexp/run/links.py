"""The paths that a start writes to, none of which may be a link: somebody else may have made the directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddpexp.errors import RefusedError, subject
from ddpexp.run.directory import RunDir, written_paths


def check_no_links(run: RunDir, name: str) -> None:
    """Check every path that a start writes to: a directory made by somebody else may contain links to anywhere.

    Raises:
        RefusedError: there is a link or a pipe in place of a file or folder; `name` is the run's name in the message.
    """
    check_kinds(run.path, written_paths(run), name)


def check_kinds(folder: Path, expected: Iterable[tuple[Path, Sequence[str]]], name: str) -> None:
    """Check that the paths in a folder, where they exist, are of the expected kind: "a file" or "a folder".

    Raises:
        RefusedError: one of them is something else; `name` is the folder's name in the message.
    """
    for path, kinds in expected:
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue
        if stat.S_ISLNK(mode):
            actual = f"a symbolic link to {os.readlink(path)}"
        elif stat.S_ISDIR(mode):
            actual = "a folder"
        else:
            actual = "a file" if stat.S_ISREG(mode) else "neither a file nor a folder"
        if actual in kinds:
            continue
        raise RefusedError(
            f"is {actual}, but this start would write to {' or '.join(kinds)} of its own",
            suggestion="Remove it, or copy it without its links.",
            **subject(name, path.relative_to(folder)),
        )
