"""Receive the signals of a run as bytes on a socket, so that a selector can wait for them."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ddpexp.launch.workers.control import SIGNALS

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS = (*END_SIGNALS, signal.SIGUSR2)  # SIGUSR2: stop to be requeued or restarted


@contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """Turn the signals of the table in docs/launchers.md into bytes on a socket, inside the context."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)  # first, or a signal in between is lost
    before = {}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number not in END_SIGNALS:  # nohup ignores SIGHUP
            before[number] = signal.signal(number, lambda *_: None)
    try:
        yield ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        ours.close()
        theirs.close()
