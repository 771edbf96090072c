"""The command's handle on the process that starts workers.

Forked with torch loaded, 10 ms each, or as new interpreters.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.launch.workers.control import SIGNALS
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system.limits import reason, said_with_limit
from ddpexp.system.oom import Memory
from ddpexp.system.programs import python

# What a worker needs before its first step. A missing name would cost seconds in every worker, so the tests hold the
# list against what workers import; nothing here may ask CUDA for devices, for that breaks every forked GPU worker.
PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "ddpexp.train.worker")

_OF_THE_LOADER = 127  # its exit code where it gets no memory


class Server:
    """The command's handle on the process that starts workers."""

    def __init__(self, start_method: str = "forkserver", preload: Sequence[str] = PRELOAD) -> None:
        """Start the process; returns at once, while it imports."""
        self.start_method = start_method
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        wanted = list(preload) if start_method == "forkserver" else []
        words = python("ddpexp.launch.workers.server:main", theirs.fileno(), os.getpid(), start_method, wanted)
        # posix_spawn, for it neither copies this process nor runs any of its code in the child.
        self.memory = Memory()  # the counters before anything of this run can be killed
        try:
            # A group of its own: Ctrl-C in the terminal reaches the command alone, which knows how to end the workers.
            self.pid = os.posix_spawn(words[0], words, os.environ, setpgroup=0, setsigmask=SIGNALS)
        except OSError as error:
            raise RefusedError(f"The fork server could not be started: {said_with_limit(error)}.") from None
        self._process: _Process | None = _Process(self.pid)
        theirs.close()

    @classmethod
    def of(cls, channel: socket.socket) -> Server:
        """Return the handle on a server that `clone` has made for this command, at the other end of a channel.

        Raises:
            RefusedError: it is gone already.
        """
        server = object.__new__(cls)
        server.start_method, server.channel, server.memory = "forkserver", channel, Memory()
        server.pid, server._process = 0, None
        answer = server.receive()
        if answer is None:
            raise RefusedError("The fork server is gone before any worker started.")
        server.pid, server._process = answer["pid"], _Process(answer["pid"], is_child=False)
        return server

    def load(self, names: Sequence[str]) -> None:
        """Have it import more, which every process that it starts from now on then has."""
        with suppress(OSError):  # the server is gone, which the next answer says
            self.channel.send(json.dumps({"op": "load", "names": list(names)}).encode())

    def clone(self, channel: int, environ: Mapping[str, str]) -> None:
        """Ask for a server like this one that answers on the other end of `channel`, for a command.

        That has its environment.

        The answers `started` and `exit` arrive here.
        """
        request = {"op": "clone", "rank": -1, "environ": dict(environ)}
        with suppress(OSError):  # the server is gone, which the next answer says
            socket.send_fds(self.channel, [json.dumps(request).encode()], [channel])

    def start(
        self,
        rank: int,
        entry: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log: int,
        descriptors: Mapping[str, int],
    ) -> None:
        """Ask for a process that calls `entry` and writes to `log`; `descriptors` reach it under these names.

        The answers `started` and `exit` arrive on the channel.
        """
        request = {
            "op": "start",
            "rank": rank,
            "entry": entry,
            "arguments": list(arguments),
            "environ": dict(environ),
            "descriptors": list(descriptors),
        }
        try:
            socket.send_fds(self.channel, [json.dumps(request).encode()], [log, *descriptors.values()])
        except OSError:
            pass  # the server is gone, which the next answer says

    def kill(self, signum: int, spared: int | None = None) -> None:
        """Send a signal to every living worker, but for the process `spared`."""
        try:
            self.channel.send(json.dumps({"op": "kill", "signal": signum, "spared": spared}).encode())
        except OSError:
            pass  # the server is gone, and its workers with it

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer, or None when the server is gone."""
        try:
            data = self.channel.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        return json.loads(data) if data else None

    def call(self, entry: str, arguments: Sequence[str]) -> tuple[int, str]:
        """Call `entry` in a process of its own, before any worker is started; return its exit code and what it printed.

        Raises:
            RefusedError: the server could not import what it should, or is gone.
        """
        log = Log(None, 0)
        try:
            self.start(-1, entry, arguments, {}, log.fileno(), {})
            while answer := self.receive():
                check_answer(answer)
                if answer["kind"] == "failed":
                    raise RefusedError(f"{answer['message']}.")
                if answer["kind"] == "exit":
                    return answer["code"], "\n".join(log.new_lines(last=True))
        finally:
            log.close()
        raise RefusedError(f"The fork server is gone before any worker started: {self.lost()[0]}")

    def lost(self) -> tuple[str, int | None]:
        """Say how the process ended, once `receive` has found it gone, and by which signal."""
        code = self._process.wait() if self._process is not None else None
        signum = -code if code is not None and code < 0 else None
        if signum is not None:
            how = f"was killed by {signal.Signals(signum).name}"
        else:
            how = "is gone" if code is None else f"ended with exit code {code}"
        text = f"the process that starts the workers {how}, and they with it"
        # Where memory cannot be had, libraries abort, the loader of libraries ends with 127, and the kernel kills.
        short = code == _OF_THE_LOADER or signum not in (signal.SIGKILL, None)
        why = reason(MemoryError()) if short else self.memory.verdict()
        return f"{text}: {why}" if why else text, signum

    def destroy(self) -> None:
        """End the server by force, and with it every worker, also when it does not answer."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the server, and with it every worker that is left; returns when it is gone."""
        if self.channel.fileno() == -1:
            return  # closed before
        self.channel.close()
        self.destroy()
        if self._process is not None:
            self._process.wait()


class _Process:
    """The process itself, which no other can be mistaken for."""

    def __init__(self, pid: int, is_child: bool = True) -> None:
        self._pid, self._is_child = pid, is_child
        self._handle: int | None = None if is_child else os.pidfd_open(pid)
        self._code: int | None = None
        self._gone = False

    def kill(self) -> None:
        if self._gone:
            return
        if self._handle is None:
            os.kill(self._pid, signal.SIGKILL)  # a child is a zombie at worst, until it is waited for
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> int | None:
        """Wait for its end and return its exit code, -n after signal n; None: only its parent knows."""
        if not self._gone and self._handle is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        elif not self._gone and self._handle is not None:
            select.select([self._handle], [], [])
            os.close(self._handle)
        self._gone = True
        return self._code


def check_answer(answer: Mapping[str, Any]) -> None:
    """Look at the server's first answer.

    Raises:
        RefusedError: a module could not be imported.
    """
    if answer["kind"] == "ready" and answer["failed"]:
        name, error = next(iter(answer["failed"].items()))
        limit = reason(error)
        advice = f"{limit[0].upper()}{limit[1:]}." if limit else "Is the installation complete?"
        raise RefusedError(f"The fork server could not import {name}: {error}. {advice}")
