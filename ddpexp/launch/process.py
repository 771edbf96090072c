"""Bind a process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens; Linux only.

    `parent` is the process id expected: when it is gone already, this process ends at once.
    Source: prctl(2), PR_SET_PDEATHSIG; the setting does not survive a fork, so every generation asks again.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
