"""Find and start programs (a Python interpreter that calls a function, others by name), never from the current folder.

Used by everything that starts a process.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# `python -c` puts the current folder on sys.path, from which Python 3.13 imports modules of its own before it runs the
# program: -P leaves it out. Python 3.10 does not have that option, and the program removes the folder first.
_OPTIONS = ["-P"] if sys.version_info >= (3, 11) else []
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); import json; path, entry, arguments = "
    "json.loads(sys.argv.pop(1)); "
    "sys.path[:] = path; import importlib; module, _, name = entry.partition(':'); "
    "importlib.import_module('ddpexp.system.streams').mask_standard_streams(); "
    "sys.exit(getattr(importlib.import_module(module), name)(*arguments))"
)
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the folder that holds ddpexp

COMMAND = ("-m", "ddpexp") if sys.version_info >= (3, 11) else (os.path.join(_HOME, "ddpexp", "__main__.py"),)
"""What follows the interpreter where a program of others, or `ddpexp.run`, starts the command.

Python 3.10 does not support `SAFE_PATH` yet, and with -m imports modules of its own from the current folder.
"""
# Set for interpreters that another program starts as `python -m ddpexp`.
SAFE_PATH = "PYTHONSAFEPATH"
OURS = "ddpexp"
"""The value of `SAFE_PATH` when ddpexp has set it: it is not meant for programs that a recipe starts."""


def python(entry: str, *arguments: Any, argv: Sequence[str] = ()) -> list[str]:
    """Return the command line of an interpreter that calls `entry` (module:function) and exits with its result.

    `arguments` are plain JSON values. The interpreter finds the modules that this process finds, but never one of the
    current folder; `argv` becomes its sys.argv[1:]. Secrets in its output are masked.
    """
    return [sys.executable, *_OPTIONS, "-c", _PROGRAM, json.dumps([[*filter(None, sys.path)], entry, arguments]), *argv]


def find(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a program, or None; relative and empty entries of PATH are ignored."""
    return shutil.which(name, path=safe_path(environ))


def safe_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return PATH without relative and empty entries."""
    return os.pathsep.join(
        folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)
    )


def located(name: str) -> str:
    """Return the path of a program. Raises FileNotFoundError, like `subprocess`, if there is none."""
    path = find(name)
    if path is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return path


def environ_of_others(environ: Mapping[str, str], folder: str | None = None) -> dict[str, str]:
    """Return the environment for a program that runs `python -m ddpexp`, which searches the current folder first.

    `folder` is its current folder, if it is not that of this process.
    """
    try:
        here = os.getcwd() if folder is None else os.path.abspath(folder)
    except OSError:
        here = ""
    return dict(environ) if here == _HOME or SAFE_PATH in environ else {**environ, SAFE_PATH: OURS}


def become(parent: int, argv: Sequence[str]) -> NoReturn:
    """Replace this process by another program that dies with the process `parent`. Raises OSError."""
    from ddpexp.system.process import die_with_parent

    die_with_parent(parent)
    os.execv(located(argv[0]), list(argv))
