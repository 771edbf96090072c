"""The first lines of every command, before slow imports: remember the parent process, handle stop signals."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

NOT_LINUX = "ddpexp runs on Linux; on Windows use the Windows Subsystem for Linux, on macOS a container."


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n")
    except (OSError, ValueError):
        return ""


# A process whose parent ends is adopted by another one, so the parent is recorded at import. A fork of this process
# has a different parent.
_ME, _PARENT = os.getpid(), os.getppid()
_PARENT_NAME = _name(_PARENT)


def parent() -> int:
    """Return the id of the process that started this one, as recorded at import: it may have ended since."""
    return _PARENT if os.getpid() == _ME else os.getppid()


def parent_name() -> str:
    """Return the name of the program that started this one, such as `salloc`; empty if it cannot be read."""
    return _PARENT_NAME if os.getpid() == _ME else _name(os.getppid())


def stop_on_signals() -> None:
    """On a stop signal exit with one sentence and the right exit code; for the time when there is nothing to undo."""

    def stop(number: int, _frame: FrameType | None) -> None:
        try:
            if select.select([], [2], [], 0)[1]:  # a blocked terminal must not keep this process alive
                os.write(2, f"ddpexp: interrupted by {signal.Signals(number).name}; nothing was started\n".encode())
        except (OSError, ValueError):
            pass  # standard error is closed
        os._exit(128 + number)

    if os.name != "posix":
        return  # other systems are refused later

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    for number in (signal.SIGUSR1, signal.SIGQUIT):  # there is nothing to save and no rank to dump yet
        signal.signal(number, signal.SIG_IGN)
