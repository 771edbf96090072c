"""launcher=spawn: this command starts and supervises all workers of this machine; several machines by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.workers.client import Server
from ddpexp.settings.key import Key

if TYPE_CHECKING:
    from ddpexp.launch.rendezvous.environment import LaunchEnvironment
    from ddpexp.launch.rendezvous.kinds import Rendezvous


@dataclass(frozen=True)
class Spawn(Launcher):
    """Start all workers of this machine.

    `start_method=forkserver` forks them from a server that has torch loaded; `spawn` gives each a new interpreter.
    On several machines the same command is run on each, with its own `node_rank`.
    """

    takes_slots: ClassVar[bool] = True
    stands_alone: ClassVar[bool] = True

    start_method: Literal["forkserver", "spawn"] = "forkserver"
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: Annotated[int | None, Key(at_least=1, at_most=65535)] = None

    def __post_init__(self) -> None:
        """Refuse an address that has its port with it, on every machine alike."""
        address = re.fullmatch(r"([^:]+):(\d+)", self.master_addr or "")
        if address is not None:
            raise RefusedError(
                "has a port",
                key="launcher.master_addr",
                value=self.master_addr,
                suggestion=f"Write launcher.master_addr={address[1]} launcher.master_port={address[2]}.",
            )

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the job and return its exit code; `server` is a fork server that was started early.

        Raises:
            RefusedError: the machines' overrides contradict each other. WorkerError: a worker failed. StoppedError: a
            signal to this process ended the run.
        """
        from ddpexp.launch.supervise import coordinator  # imported late: other commands need only the fields

        environment, rendezvous = self._environment(job.request.nodes)
        if server is not None and server.start_method != self.start_method:
            server.close()
            server = None
        server = server or Server(self.start_method)
        try:
            return coordinator.run(job, environment, rendezvous, server, debugs=True)
        finally:
            server.close()

    @property
    def forks_here(self) -> bool:
        """Return whether workers are forked from a warm server."""
        return self.start_method == "forkserver"

    def arguments_of_this_machine(self) -> list[str]:
        """Return the override with this machine's number, where several machines are started by hand."""
        return [f"launcher.node_rank={self.node_rank}"] if self.node_rank is not None else []

    def _environment(self, nodes: int | str) -> tuple[LaunchEnvironment, Rendezvous | None]:
        from ddpexp.launch.rendezvous.environment import LaunchEnvironment
        from ddpexp.launch.rendezvous.kinds import Fixed

        fields = {"node_rank": self.node_rank, "master_addr": self.master_addr, "master_port": self.master_port}
        if nodes == "auto" or nodes == 1:
            given = next((name for name, value in fields.items() if value is not None), None)
            if given:
                raise RefusedError(
                    "is for several machines",
                    key=f"launcher.{given}",
                    value=fields[given],
                    suggestion="Set their number with trainer.nodes=... .",
                )
            return LaunchEnvironment(), None
        assert isinstance(nodes, int)
        missing = [f"launcher.{name}" for name, value in fields.items() if value is None]
        if missing:
            raise RefusedError(
                f"with launcher=spawn needs {' and '.join(missing)} too",
                key="trainer.nodes",
                value=nodes,
                suggestion="Run the same command on every machine, with launcher.node_rank from 0 to "
                f"{nodes - 1} and the address and a free port of the first machine.",
            )
        assert self.node_rank is not None
        assert self.master_addr is not None
        assert self.master_port is not None
        if not 0 <= self.node_rank < nodes:
            raise RefusedError(
                f"is out of range for trainer.nodes={nodes}",
                key="launcher.node_rank",
                value=self.node_rank,
                suggestion=f"Use 0 to {nodes - 1}.",
            )
        rendezvous = Fixed(self.master_addr, self.master_port, ("launcher.master_addr", "launcher.master_port"))
        return LaunchEnvironment(self.node_rank, nodes, nodes=nodes), rendezvous
