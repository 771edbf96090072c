"""The first lines of a command, before the imports that take time: signals count from here on."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


def stop_on_signals() -> None:
    """End this process in one sentence and with the right exit code at a stop signal, as long as there is nothing to undo."""

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
