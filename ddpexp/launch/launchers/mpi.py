"""launcher=mpi: this command is one rank, started by mpirun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddpexp.launch import Job, WorkerRequest
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.rendezvous import started_by
from ddpexp.launch.rendezvous.environment import of_mpi
from ddpexp.launch.rendezvous.kinds import by_key
from ddpexp.launch.supervise import coordinator
from ddpexp.launch.workers.client import Server


@dataclass(frozen=True)
class Mpi(Launcher):
    """Join the ranks that mpirun has started: Open MPI, MPICH and its derivatives.

    Only mpirun is needed, not MPI itself.
    """

    provides_mpi: ClassVar[bool] = True

    @property
    def ranks_started_externally(self) -> bool:
        """Return True: mpirun starts the ranks."""
        return True

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return mpirun's command line; like `Launcher.started_by`."""
        return started_by.mpirun(argv, of_mpi(WorkerRequest())[0].size)

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run this rank's worker and return its exit code.

        Raises:
            RefusedError: no mpirun started this command, or an override contradicts it. WorkerError: a worker failed.
            StoppedError: a signal to this process ended the run.
        """
        environment, key = of_mpi(job.request)
        server = server or Server()
        rendezvous = by_key(f"mpi {key}", job.folder, environment.nodes == 1) if environment.size > 1 else None
        try:
            return coordinator.run(job, environment, rendezvous, server)
        finally:
            server.close()
