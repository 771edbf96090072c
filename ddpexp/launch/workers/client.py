"""The command's handle on the process that starts workers: as forks with torch loaded (10 ms), or new interpreters."""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddpexp import TESTED_PYTHONS
from ddpexp.errors import RefusedError
from ddpexp.launch.workers.control import SIGNALS
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system.limits import EXIT_NO_MEMORY, reason, reason_with_limit
from ddpexp.system.memory_file import memory_file
from ddpexp.system.oom import Memory
from ddpexp.system.process import how_ended
from ddpexp.system.programs import python

# Modules that a worker needs before its first step. A missing one would cost seconds in every worker, so a test
# compares the list with what workers import; nothing here may initialise CUDA: GPU workers could not be forked then.
PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "ddpexp.train.worker")


class Server:
    """The command's handle on the process that starts workers."""

    def __init__(self, start_method: str = "forkserver", preload: Sequence[str] = PRELOAD) -> None:
        """Start the process; returns immediately, while it is still importing."""
        self.start_method = start_method
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        modules = list(preload) if start_method == "forkserver" else []
        argv = python("ddpexp.launch.workers.server:main", theirs.fileno(), os.getpid(), start_method, modules)
        self.memory = Memory()  # the counters before any process of this run can be killed
        try:
            # posix_spawn neither copies this process nor runs any of its code in the child. A new process group:
            # Ctrl-C in the terminal reaches only the command, which ends the workers in order.
            self.pid = os.posix_spawn(argv[0], argv, os.environ, setpgroup=0, setsigmask=SIGNALS)
        except OSError as error:
            raise RefusedError(f"The fork server could not be started: {reason_with_limit(error)}.") from None
        self._process: _Process | None = _Process(self.pid)
        theirs.close()

    @classmethod
    def of(cls, channel: socket.socket) -> Server:
        """Return the handle on a server that `clone` has created for this command, given its channel.

        Raises:
            RefusedError: the server is gone already.
        """
        server = object.__new__(cls)
        server.start_method = "forkserver"
        server.channel = channel
        server.memory = Memory()
        server.pid, server._process = 0, None
        answer = server.receive()
        if answer is None:
            raise RefusedError("The fork server ended before any worker started.")
        server.pid, server._process = answer["pid"], _Process(answer["pid"], is_child=False)
        return server

    def load(self, names: Sequence[str]) -> None:
        """Import more modules in the server, for every process that it starts from now on."""
        with suppress(OSError):  # the server is gone; the next `receive` reports it
            self.channel.send(json.dumps({"op": "load", "names": list(names)}).encode())

    def clone(self, channel: int, environ: Mapping[str, str]) -> None:
        """Request a copy of this server for another command, which it serves through `channel` with `environ`.

        The answers `started` and `exit` arrive here.
        """
        self._request("clone", {"rank": -1, "environ": dict(environ)}, [channel])

    def start(
        self,
        rank: int,
        entry: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log: int,
        descriptors: Mapping[str, int],
        uses_cuda: bool = False,
    ) -> None:
        """Request a process that calls `entry` and writes to `log`.

        `descriptors` are passed to it; their numbers there are in its environment under these names. One that
        `uses_cuda` is not forked from a server that has initialised CUDA. The answers `started` and `exit` arrive on
        the channel.
        """
        request = {
            "rank": rank,
            "entry": entry,
            "arguments": list(arguments),
            "environ": dict(environ),
            "descriptors": list(descriptors),
            "uses_cuda": uses_cuda,
        }
        self._request("start", request, [log, *descriptors.values()])

    def _request(self, op: str, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Send a request of any size, which a packet would limit: what is known of the data is part of the arguments.

        Raises:
            OSError: there is no room for it.
        """
        with memory_file(request) as described, suppress(OSError):  # the server is gone; the next `receive` reports it
            socket.send_fds(self.channel, [json.dumps({"op": op}).encode()], [described, *descriptors])

    def kill(self, signum: int, spared: int | None = None) -> None:
        """Send a signal to every living worker except the process `spared`."""
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
        """Call `entry` in a separate process before any worker is started; return its exit code and its output.

        Raises:
            RefusedError: the server could not import its modules, or is gone.
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
        raise RefusedError(f"The fork server ended before any worker started: {self.lost()[0]}")

    def lost(self) -> tuple[str, int | None]:
        """Return a text on how the process ended and the signal that killed it, once `receive` has returned None."""
        code = self._process.wait() if self._process is not None else None
        signum = -code if code is not None and code < 0 else None
        how = "is gone" if code is None else how_ended(code)
        text = f"the process that starts the workers {how}, and they with it"
        # When memory runs out, libraries abort, the dynamic loader exits with 127, and the kernel kills.
        allocation_failed = code == EXIT_NO_MEMORY or signum not in (signal.SIGKILL, None)
        why = reason(MemoryError()) if allocation_failed else self.memory.verdict()
        return f"{text}: {why}" if why else text, signum

    def destroy(self) -> None:
        """Kill the server, and with it every worker, even when it does not answer."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill the server, and with it every remaining worker; returns when it is gone."""
        if self.channel.fileno() == -1:
            return  # closed before
        self.channel.close()
        self.destroy()
        if self._process is not None:
            self._process.wait()


class _Process:
    """The server's process, safe against reuse of its process id."""

    def __init__(self, pid: int, is_child: bool = True) -> None:
        self._pid = pid
        self._handle: int | None = None if is_child else os.pidfd_open(pid)
        self._code: int | None = None
        self._gone = False

    def kill(self) -> None:
        if self._gone:
            return
        if self._handle is None:
            os.kill(self._pid, signal.SIGKILL)  # a child that has ended stays a zombie until it is waited for
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> int | None:
        """Wait for its end and return its exit code, -n after signal n; None if only its parent can know it."""
        if not self._gone and self._handle is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        elif not self._gone and self._handle is not None:
            select.select([self._handle], [], [])
            os.close(self._handle)
        self._gone = True
        return self._code


def check_answer(answer: Mapping[str, Any]) -> None:
    """Check the server's first answer.

    Raises:
        RefusedError: a module could not be imported.
    """
    if answer["kind"] == "ready" and answer["failed"]:
        name, error = next(iter(answer["failed"].items()))
        limit = reason(error)
        if limit:
            advice = f"{limit[0].upper()}{limit[1:]}."
        elif error.startswith(("ImportError", "ModuleNotFoundError")):
            advice = "Is the installation complete?"
        else:
            advice = (
                f"ddpexp is tested on Python {TESTED_PYTHONS} with the versions in constraints.txt; this is Python "
                f"{platform.python_version()}, and ddpexp doctor shows the versions here."
            )
        raise RefusedError(f"The fork server could not import {name}: {error}", suggestion=advice)
