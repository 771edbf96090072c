"""The mode of a terminal (echo, line editing), restored even if the process that lends the terminal is killed."""

from __future__ import annotations

import os
import signal
import termios
import time
from contextlib import suppress
from typing import Any

from ddpexp.system.programs import python

_SETTLE_SECONDS = 0.1  # for processes that use the terminal to end with the command


def is_in_foreground(terminal: int) -> bool:
    """Return whether this process may read from the terminal: it is no background job of a shell."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True  # not our controlling terminal, so there is no job control


def descriptor_of_terminal() -> int | None:
    """Return standard input if it is a terminal to read from and write to."""
    try:
        termios.tcgetattr(0)
        os.write(0, b"")
    except (OSError, termios.error):
        return None
    return 0


class ModeGuard:
    """Keeps the mode of a terminal, and a process that restores it if this one is killed."""

    def __init__(self, terminal: int) -> None:
        """Start the process."""
        self._terminal = terminal
        self._mode = termios.tcgetattr(terminal)
        reading, self._writing = os.pipe()
        argv = python("ddpexp.system.terminal_mode:restore_after", os.getpgrp(), _plain(self._mode))
        streams = [
            (os.POSIX_SPAWN_DUP2, terminal, 1),
            (os.POSIX_SPAWN_DUP2, reading, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        # A group of its own: Ctrl-C in the terminal does not reach it. It stays in the session, where it can see
        # whether a shell has taken over.
        self._pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=streams, setpgroup=0)
        os.close(reading)

    def begin(self) -> None:
        """Remember the mode."""
        with suppress(termios.error):
            self._mode = termios.tcgetattr(self._terminal)

    def restore(self) -> None:
        """Restore the mode."""
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._mode)

    def close(self) -> None:
        """End the process, which leaves the terminal alone."""
        with suppress(OSError):
            os.write(self._writing, b".")
        os.close(self._writing)
        os.waitpid(self._pid, 0)


def restore_after(group: int, mode: list[Any]) -> int:
    """Wait for the end of the command, and restore the mode unless it has done so or a shell has taken over.

    Standard input is a pipe from the command, standard output the terminal.
    """
    reading, terminal = 0, 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    if os.read(reading, 1):
        return 0
    for _ in range(2):
        try:
            if os.tcgetpgrp(terminal) != group:
                return 0
        except OSError:
            pass  # not the controlling terminal: no shell controls jobs here
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, mode)
        time.sleep(_SETTLE_SECONDS)
    return 0


def _plain(mode: list[Any]) -> list[Any]:
    """Return the mode as JSON holds it."""
    *flags, characters = mode
    return [*flags, [character[0] if isinstance(character, bytes) else character for character in characters]]
