"""Run a job whose workers' output nobody reads, from a fork server that serves several jobs one after the other."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from ddpexp.launch import Job
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.rendezvous.environment import LaunchEnvironment
from ddpexp.launch.supervise import coordinator
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome


@dataclass(frozen=True)
class _Here(Spawn):
    """Start the workers from a server that serves several jobs."""

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the job and return its exit code."""
        assert server is not None
        return coordinator.run(job, LaunchEnvironment(), None, server)


def run_quietly(job: Job, server: Server) -> None:
    """Run a job on this machine.

    Raises:
        RefusedError, WorkerError, StoppedError: as `Launcher.launch`.
    """
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        outcome.launch(_Here(), job, server)
