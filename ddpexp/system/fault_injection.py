"""Named points at which tests inject faults; disabled unless the environment variable is set."""

from __future__ import annotations

import collections
import ctypes
import errno
import itertools
import os
import signal
import sys
import time
from pathlib import Path

VARIABLE = "DDPEXP_FAULT"
"""`point:action[:rank[:nth time]]`; without a rank on every rank, and `*` as the time means every time.

Points: joined, forward, backward, step, evaluate, record, save, leave, and the points of a checkpoint's write,
all under the names that `fault_point` is called with.
Actions: raise, exit=CODE (sys.exit), leave=CODE (os._exit), abort, segv, kill, stop, term, int, sleep (forever), spin
(forever, holding the interpreter lock), ignore (signals from here on), pause=FILE (create the file, then sleep
forever), late=FILE (create the file, then sleep a second), enospc, eio.
"""
_SPECIFICATION = os.environ.get(VARIABLE, "")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "int": signal.SIGINT}
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_visits: collections.Counter[str] = collections.Counter()


def fault_point(point: str) -> None:
    """Inject a fault if `DDPEXP_FAULT` names this point, this rank and this visit; otherwise do nothing.

    Raises:
        RuntimeError, OSError, SystemExit: where the action is to raise it.
    """
    if not _SPECIFICATION:
        return
    name, action, *rest = _SPECIFICATION.split(":")
    if name != point:
        return
    _visits[point] += 1
    if rest and os.environ.get("RANK", "0") != rest[0]:
        return
    if len(rest) > 1 and rest[1] != "*" and _visits[point] != int(rest[1]):
        return
    _do(*action.partition("=")[::2], point)


def _do(action: str, value: str, point: str) -> None:  # noqa: C901, PLR0912  (a list of faults)
    if action == "raise":
        raise RuntimeError(f"injected at {point}")
    if action == "exit":
        sys.exit(int(value))
    if action == "leave":
        os._exit(int(value))
    if action == "abort":
        os.abort()
    if action == "segv":
        ctypes.string_at(0)
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return
    if action == "ignore":
        for number in _SIGNALS.values():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN)
        return
    if action == "spin":
        collections.deque(itertools.repeat(None), maxlen=0)  # a loop in C, which never releases the lock
    if action == "late":
        Path(value).touch()
        time.sleep(1)
        return
    if action in ("pause", "sleep"):
        if value:
            Path(value).touch()
        while True:
            time.sleep(60)
    raise OSError(_ERRORS[action], os.strerror(_ERRORS[action]))
