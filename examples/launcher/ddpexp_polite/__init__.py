import os
from dataclasses import dataclass

from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.workers.client import Server


@dataclass(frozen=True)
class Polite(Launcher):
    """All workers of this machine, at a lower priority."""

    niceness: int = 10

    def launch(self, job: Job, server: Server | None = None) -> int:
        os.nice(self.niceness)
        if server is not None:
            server.close()  # started before, at the usual priority
        return Spawn().launch(job)
