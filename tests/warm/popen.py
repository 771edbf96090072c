"""A command that is a fork of the process of `commands.py` where that is as good as a new interpreter."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.warm.state import COMMANDS, ignored_signals, state, surroundings


def start_command(argv: Sequence[str], folder: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start `python -m ddpexp` in a session of its own, with pipes for what it prints.

    Args:
        argv: The arguments after `ddpexp`.
        folder: Its current folder.
        environ: Its environment.
    """
    kind = Forked if COMMANDS in environ else subprocess.Popen
    return kind(
        [sys.executable, "-m", "ddpexp", *argv],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Forked(subprocess.Popen[str]):
    """The interface of a child, for a process whose parent reports its end over a socket."""

    _reports: socket.socket | None = None

    @property
    def forked(self) -> bool:
        """Whether it is one: otherwise a new interpreter has been started after all."""
        return self._reports is not None

    def _execute_child(self, args: list[str], *others: Any) -> None:
        (folder, environ), streams = others[4:6], others[9:15]
        request = {
            "state": state(ignored_signals(), environ),
            "environ": environ,
            "folder": str(folder),
            "argv": args[3:],
            **surroundings(),
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(environ[COMMANDS])
            socket.send_fds(connection, [json.dumps(request).encode()], [streams[0], streams[3], streams[5]])
            pid = json.loads(connection.recv(100))
            if pid is None:
                super()._execute_child(args, *others)  # type: ignore[misc]
                return
            self.pid, self._reports, self._child_created = pid, connection.dup(), True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

    def _report(self, timeout: float | None) -> int | None:
        """Return the exit code once its parent has reported it."""
        assert self._reports is not None
        if self.returncode is None and select.select([self._reports], [], [], timeout)[0]:
            data = self._reports.recv(100)
            self.returncode = os.waitstatus_to_exitcode(json.loads(data)) if data else -signal.SIGKILL
            self._reports.close()
        return self.returncode

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._reports is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc,no-any-return]
        return self._report(0)

    def _wait(self, timeout: float | None) -> int:
        if self._reports is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        code = self._report(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code
