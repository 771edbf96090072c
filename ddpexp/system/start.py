"""The first lines of a command, before the imports that take time.

What has started it, and signals that count from here on.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n")
    except (OSError, ValueError):
        return ""


# A process whose parent has ended gets another one, so the first look counts. A fork of this process has its own
# parent.
_ME, _PARENT = os.getpid(), os.getppid()
_PARENT_NAME = _name(_PARENT)


def parent() -> int:
    """Return the id of the process that has started this one, as of the first line: it may have ended since."""
    return _PARENT if os.getpid() == _ME else os.getppid()


def parent_name() -> str:
    """Return the name of the program that has started this one, such as `salloc`; empty where it cannot be seen."""
    return _PARENT_NAME if os.getpid() == _ME else _name(os.getppid())


def stop_on_signals() -> None:
    """End this process in one sentence and with the right exit code at a stop signal, as long.

    As there is nothing to undo.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        try:
            if select.select([], [2], [], 0)[1]:  # a terminal that is stopped must not keep this process
                os.write(2, f"ddpexp: interrupted by {signal.Signals(number).name}; nothing was started\n".encode())
        except (OSError, ValueError):
            pass  # standard error is closed
        os._exit(128 + number)

    if os.name != "posix":
        return  # such a system is refused soon

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    for number in (signal.SIGUSR1, signal.SIGQUIT):  # there is nothing to save and no rank to look at yet
        signal.signal(number, signal.SIG_IGN)
