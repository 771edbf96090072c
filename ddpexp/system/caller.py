"""What a command reports to the Python process that has started it by `ddpexp.run` or `ddpexp.sweep`.

That process names itself, and a pipe that the command inherits, in a variable. Only the command has this pipe: other
processes that inherit the variable, such as what a recipe starts, report nothing. Free of imports that take long: the
command asks before anything else whether it has a caller.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ddpexp.system import secrets
from ddpexp.system.process import die_with_parent

VARIABLE = "DDPEXP_CALLER"
_LIVE = "live"
_CHARACTERS = 20_000  # of a traceback


@dataclass(frozen=True)
class Ready:
    """The command handles signals from here on."""


@dataclass(frozen=True)
class Directory:
    """The directory of the run or the sweep is there."""

    path: str
    is_sweep: bool = False


@dataclass(frozen=True)
class ProgressLine:
    """How far a run is, for a line that is redrawn."""

    done: int
    total: int
    text: str


@dataclass(frozen=True)
class End:
    """How the command ended, other than with success."""

    kind: Literal["refused", "failed", "stopped"]
    sentence: str
    signum: int | None = None
    failure: Mapping[str, Any] | None = None  # ddpexp.errors.Failure: which worker failed
    fields: Mapping[str, str | None] | None = None  # of the error, if no worker failed


Message: TypeAlias = Ready | Directory | ProgressLine | End
_KINDS = {kind.__name__: kind for kind in (Ready, Directory, ProgressLine, End)}


def variable(pid: int, descriptor: int, live: bool) -> str:
    """Return the value of the variable for a command that inherits the pipe's writing end.

    `pid` is the caller's; `live`: it redraws the line of progress.
    """
    return f"{pid}:{descriptor}:{os.fstat(descriptor).st_ino}:{_LIVE if live else ''}"


def parse(line: bytes) -> Message:
    """Return the message of a line. Raises ValueError, KeyError, TypeError."""
    name, fields = json.loads(line)
    return _KINDS[name](**fields)


def follow(environ: Mapping[str, str] = os.environ) -> None:
    """Report that this command handles signals, and have it stopped, as SIGTERM does, when its caller dies."""
    pipe = _pipe(environ)
    if pipe is not None:
        os.set_inheritable(pipe[1], False)
        die_with_parent(pipe[0], signal.SIGTERM)
        report(Ready(), environ)


def is_live(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether there is a caller that redraws the line of progress."""
    pipe = _pipe(environ)
    return pipe is not None and pipe[2] == _LIVE


def report(message: Message, environ: Mapping[str, str] = os.environ) -> bool:
    """Send a message to the caller; return whether it went there."""
    pipe = _pipe(environ)
    if pipe is None:
        return False
    facts = asdict(message)
    if not isinstance(message, Directory):  # whose path the caller opens
        facts = secrets.masked_tree(facts)
    failure = facts.get("failure")
    if failure and failure["traceback"]:
        failure["traceback"] = failure["traceback"][-_CHARACTERS:]
    data = json.dumps([type(message).__name__, facts]).encode() + b"\n"
    with suppress(OSError):  # the caller has gone
        while data:
            data = data[os.write(pipe[1], data) :]
        return True
    return False


def _pipe(environ: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Return the caller's process id, the pipe and its option; None where this process has no caller."""
    pid, _, rest = environ.get(VARIABLE, "").partition(":")
    descriptor, _, rest = rest.partition(":")
    inode, _, option = rest.partition(":")
    if not (pid.isdecimal() and descriptor.isdecimal() and inode.isdecimal()):
        return None
    try:
        found = os.fstat(int(descriptor))
    except OSError:
        return None
    return (int(pid), int(descriptor), option) if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode) else None
