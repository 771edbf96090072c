"""What lives: a process as the kernel describes it, and lives that are bound to a parent's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.25


def stat(pid: int) -> list[str] | None:
    """Return what the kernel says of a process, from its state on; None when it is gone. Source: proc(5), stat.

    Index 0 is its state, a letter; 11 and 12 are the ticks that it has used itself and the kernel for it, 13 and 14
    those of its children that it has waited for; 19 is when it began; 49 is how it has ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and not waited for; none when it is gone. Source.

    Proc(5), children.
    """
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def ancestors(pid: int) -> list[int]:
    """Return the parent of a process, its parent and so on, as far as they can be seen."""
    found: list[int] = []
    while (words := stat(pid)) is not None and (pid := int(words[1])):
        found.append(pid)
    return found


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; of one that nobody has waited for, only the exit code is left."""
    words = stat(pid)
    return words is None or words[0] in "ZX"


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process that its parent has not waited for yet, -n after signal n; None while it lives.

    Only for processes of this user: of others the kernel says 0. Source: proc(5), stat, exit_code.
    """
    words = stat(pid)
    return os.waitstatus_to_exitcode(int(words[49])) if words is not None and words[0] == "Z" else None


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, by a signal or a debugger."""
    words = stat(pid)
    return words is not None and words[0] in "Tt"


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


def end_with_parent(
    code: int, report: Callable[[int], None], parent: int, was_lost: Callable[[], bool] = lambda: False
) -> None:
    """End this process with `code` soon after its parent has ended, `report` first: it gets the parent's process id.

    `parent` is the process id expected, and `was_lost` tells whether that was another process already: it is asked
    once.

    For what other programs start. The kernel's own signal comes when the *thread* ends that has forked, and programs
    fork from threads that they end (Open MPI does with many ranks). A thread of ours looks, whatever the main one waits
    for.
    """

    def look() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread, and wake it
        lost = was_lost()
        while not lost and os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        try:
            report(parent)
        finally:
            os._exit(code)

    threading.Thread(target=look, daemon=True).start()
