"""Named points in the product where a test can make something break; off unless the environment asks for it."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from pathlib import Path

VARIABLE = "DDPEXP_FAULT"  # point:action[:rank[:nth time]]; actions: kill, pause=FILE, enospc, eio
_ASKED = os.environ.get(VARIABLE, "")
_reached: Counter[str] = Counter()


def reach(point: str) -> None:
    """Come to a point. Does nothing unless `DDPEXP_FAULT` names it, this rank, and how often it was reached before.

    Raises:
        OSError: the action says so.
    """
    if not _ASKED:
        return
    name, action, *rest = _ASKED.split(":")
    if name != point:
        return
    _reached[point] += 1
    if rest and os.environ.get("RANK", "0") != rest[0]:
        return
    if len(rest) > 1 and rest[1] != "*" and _reached[point] != int(rest[1]):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action.startswith("pause="):
        Path(action.removeprefix("pause=")).touch()
        while True:
            time.sleep(60)
    number = {"enospc": errno.ENOSPC, "eio": errno.EIO}[action]
    raise OSError(number, os.strerror(number))
