"""launcher=spawn: all workers of this machine, started and watched by this command; several machines by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.workers.client import Server

if TYPE_CHECKING:
    from ddpexp.launch.rendezvous.environment import LaunchEnvironment
    from ddpexp.launch.rendezvous.meeting import Rendezvous


@dataclass(frozen=True)
class Spawn(Launcher):
    """Start all workers on this machine.

    `start_method=forkserver` forks them from a server that has torch loaded; `spawn` gives each a new interpreter.
    Over several machines the same command is typed on each, with a `node_rank` of its own.
    """

    start_method: Literal["forkserver", "spawn"] = "forkserver"
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        """Refuse an address that has its port with it, on every machine alike."""
        address = re.fullmatch(r"([^:]+):(\d+)", self.master_addr or "")
        if address is not None:
            raise RefusedError(
                f"launcher.master_addr={self.master_addr} has a port: write launcher.master_addr={address[1]} "
                f"launcher.master_port={address[2]}."
            )

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the job and return its exit code; `server` is one started early, to save the wait.

        Raises:
            RefusedError: the machines' words contradict. WorkerError: a worker failed. StoppedError: a signal to this
            process ended the run.
        """
        from ddpexp.launch.supervise import coordinator  # late: a question needs no more than the fields

        place, way = self._place(job.request.nodes)
        if server is not None and server.start_method != self.start_method:
            server.close()
            server = None
        server = server or Server(self.start_method)
        try:
            return coordinator.run(job, place, way, server)
        finally:
            server.close()

    @property
    def forks_here(self) -> bool:
        """Return whether workers are forked from a warm server."""
        return self.start_method == "forkserver"

    def words_of_this_machine(self) -> list[str]:
        """Return this machine's number as it is typed, where several machines are started by hand."""
        return [f"launcher.node_rank={self.node_rank}"] if self.node_rank is not None else []

    def _place(self, nodes: int | str) -> tuple[LaunchEnvironment, Rendezvous | None]:
        from ddpexp.launch.rendezvous.environment import LaunchEnvironment
        from ddpexp.launch.rendezvous.meeting import Fixed

        typed = {"node_rank": self.node_rank, "master_addr": self.master_addr, "master_port": self.master_port}
        if isinstance(nodes, str) and nodes != "auto":
            raise RefusedError(f"trainer.nodes={nodes} is a range, which only launcher=elastic understands.")
        if nodes == "auto" or nodes == 1:
            given = next((name for name, value in typed.items() if value is not None), None)
            if given:
                raise RefusedError(
                    f"launcher.{given}={typed[given]} is for several machines: say how many with trainer.nodes=... ."
                )
            return LaunchEnvironment(), None
        assert isinstance(nodes, int)
        if nodes < 1:
            raise RefusedError(f"trainer.nodes={nodes} leaves no machine: use 1 or more.")
        missing = [f"launcher.{name}" for name, value in typed.items() if value is None]
        if missing:
            raise RefusedError(
                f"trainer.nodes={nodes} with launcher=spawn wants {' and '.join(missing)} too: type the same command "
                "on every "
                f"machine, with launcher.node_rank from 0 to {nodes - 1} and the first one's address and a free port."
            )
        assert self.node_rank is not None
        assert self.master_addr is not None
        assert self.master_port is not None
        if not 0 <= self.node_rank < nodes:
            raise RefusedError(
                f"launcher.node_rank={self.node_rank}, but trainer.nodes={nodes}: it goes from 0 to {nodes - 1}."
            )
        if not 0 < self.master_port < 65536:
            raise RefusedError(f"launcher.master_port={self.master_port} is no port: use one from 1 to 65535.")
        way = Fixed(self.master_addr, self.master_port, ("launcher.master_addr", "launcher.master_port"))
        return LaunchEnvironment(self.node_rank, nodes, nodes=nodes), way
