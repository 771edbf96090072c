"""launcher=spawn: all workers on this machine, forked from a warm server and watched by this command."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpexp.launch import Job
from ddpexp.launch.control import CONTROL_FD, STORE_FD, Lines
from ddpexp.launch.log import Log
from ddpexp.launch.supervise import Worker, supervise
from ddpexp.launch.terminal import Terminal

# What a worker needs before its first step. A missing name would cost seconds in every worker, so the tests hold the
# list against what workers import; nothing here may ask CUDA for devices, for that breaks every forked GPU worker.
PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "ddpexp.worker")

# The folder of the command is not trusted to hold a json.py, so it leaves the path before anything is imported.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); import json; "
    "fd, parent, method, path, preload = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from ddpexp.launch.server import main; main(fd, parent, method, preload)"
)


class Server:
    """The command's handle on the process that starts workers."""

    def __init__(self, start_method: str = "forkserver", preload: Sequence[str] = PRELOAD) -> None:
        """Start the process; returns at once, while it imports."""
        self.start_method = start_method
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        wanted = list(preload) if start_method == "forkserver" else []
        words = json.dumps([theirs.fileno(), os.getpid(), start_method, sys.path, wanted])
        # posix_spawn, for it neither copies this process nor runs any of its code in the child.
        self.pid = os.posix_spawn(sys.executable, [sys.executable, "-c", _PROGRAM, words], os.environ)
        theirs.close()

    def start(self, rank: int, job: Job, environ: Mapping[str, str], log: int, descriptors: Mapping[str, int]) -> None:
        """Ask for a worker that writes to `log`; `descriptors` reach it under these names.

        The answers `started` and `exit` arrive on the channel.
        """
        request = {
            "op": "start",
            "rank": rank,
            "entry": job.entry,
            "arguments": list(job.arguments),
            "environ": dict(environ),
            "descriptors": list(descriptors),
        }
        try:
            socket.send_fds(self.channel, [json.dumps(request).encode()], [log, *descriptors.values()])
        except OSError:
            pass  # the server is gone, which the next answer says

    def kill(self, signum: int) -> None:
        """Send a signal to every living worker."""
        try:
            self.channel.send(json.dumps({"op": "kill", "signal": signum}).encode())
        except OSError:
            pass  # the server is gone, and its workers with it

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer, or None when the server is gone."""
        try:
            data = self.channel.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        return json.loads(data) if data else None

    def close(self) -> None:
        """End the server, and with it every worker that is left; returns when it is gone."""
        if self.channel.fileno() == -1:
            return  # closed before, and the process id may be another's by now
        self.channel.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@dataclass(frozen=True)
class Spawn:
    """Start all workers on this machine.

    `start_method=forkserver` forks them from a server that has torch loaded; `spawn` gives each a new interpreter.
    """

    start_method: Literal["forkserver", "spawn"] = "forkserver"

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the job on loopback and return its exit code; `server` is one started early, to save the wait.

        Raises:
            WorkerError: a worker failed. StoppedError: a signal to this process ended the run.
        """
        if server is not None and server.start_method != self.start_method:
            server.close()
            server = None
        server = server or Server(self.start_method)
        try:
            return self._run(job, server)
        finally:
            server.close()

    def _run(self, job: Job, server: Server) -> int:
        world = job.layout.world_size
        # Bound here and handed to rank zero, so that the port is ours from the start and on loopback alone: a store that
        # torch opens itself listens on every interface, and a port that is found, closed and opened again can be lost.
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as store:
            workers = []
            for rank in range(world):
                ours, theirs = socket.socketpair()
                environ = environment(rank, world, store.getsockname()[1])
                descriptors = {CONTROL_FD: theirs.fileno()} | ({STORE_FD: store.fileno()} if rank == 0 else {})
                log = Log(job.logs, rank)
                server.start(rank, job, environ, log.fileno(), descriptors)
                theirs.close()
                workers.append(Worker(rank, Lines(ours), log))
        try:
            return supervise(server, workers, Terminal())
        finally:
            for worker in workers:
                worker.log.close()


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that tell a worker of one node its place."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
