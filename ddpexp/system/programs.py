"""Programs that ddpexp starts: a Python that calls a function of ours, and others by name.

None is of the current folder.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# What `python -c` would look for in the current folder leaves the path before anything is imported.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); import json; path, entry, arguments = "
    "json.loads(sys.argv.pop(1)); "
    "sys.path[:] = path; import importlib; module, _, name = entry.partition(':'); "
    "sys.exit(getattr(importlib.import_module(module), name)(*arguments))"
)
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the folder that holds ddpexp

# A Python that another program starts as `python -m ddpexp` gets it from the environment. Python 3.10 does not know it
# yet.
SAFE_PATH = "PYTHONSAFEPATH"
OURS = "ddpexp"
"""The value of `SAFE_PATH` where it is ours: it is not meant for what a recipe starts."""


def python(entry: str, *arguments: Any, argv: Sequence[str] = ()) -> list[str]:
    """Return the command of a Python that calls `entry`, module:function, with plain values and leaves with what.

    That returns.

    It finds the modules that this process finds, but never one of the current folder; `argv` becomes its sys.argv[1:].
    """
    return [sys.executable, "-c", _PROGRAM, json.dumps([[*filter(None, sys.path)], entry, arguments]), *argv]


def find(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return where a program is, None where it is not: an entry of PATH such as `.`, or an empty one, is left out."""
    return shutil.which(name, path=safe_path(environ))


def safe_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return PATH without entries that lead to the current folder."""
    return os.pathsep.join(
        folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)
    )


def located(name: str) -> str:
    """Return where a program is. Raises FileNotFoundError like `subprocess` where it is not."""
    found = find(name)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return found


def environ_of_others(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program that starts `python -m ddpexp`, which looks in the current folder first."""
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    return dict(environ) if here == _HOME or SAFE_PATH in environ else {**environ, SAFE_PATH: OURS}


def become(parent: int, words: Sequence[str]) -> NoReturn:
    """Become another program, which ends with the process `parent`, whatever happens to that. Raises OSError."""
    from ddpexp.system.process import die_with_parent

    die_with_parent(parent)
    os.execv(located(words[0]), list(words))
