"""launcher=torchrun-env: this command is one rank, started by torchrun or by hand with the same variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpexp.errors import AbsentError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.rendezvous import started_by
from ddpexp.launch.rendezvous.environment import LaunchEnvironment, of_torchrun
from ddpexp.launch.rendezvous.kinds import Fixed, Rendezvous, StoreRendezvous
from ddpexp.launch.supervise import coordinator
from ddpexp.launch.workers.client import Server

_MARK = "found: "  # marks the line with the store's answer among torch's warnings


@dataclass(frozen=True)
class TorchrunEnv(Launcher):
    """Join the ranks that torchrun, torch.distributed.launch, or a user with `export RANK=...` has started."""

    @property
    def ranks_started_externally(self) -> bool:
        """Return True: torchrun or the user starts the ranks."""
        return True

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return torchrun's command line; like `Launcher.started_by`."""
        return started_by.torchrun(argv)

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run this rank's worker and return its exit code.

        Raises:
            RefusedError: a variable is missing or contradicts another one. WorkerError: a worker failed. StoppedError:
            a signal to this process ended the run.
        """
        return run(job, server, f"ddpexp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")


def run(job: Job, server: Server | None, key: str) -> int:
    """Run one rank of torchrun; the ranks find one another under `key` in the agent's store, where there is one."""
    environment = of_torchrun(job.request)
    server = server or Server()
    try:
        rendezvous = rendezvous_of(environment, server, job.request.timeout.init_seconds, key)
        return coordinator.run(job, environment, rendezvous, server)
    finally:
        server.close()


def rendezvous_of(
    environment: LaunchEnvironment, server: Server, seconds: float, key: str, environ: Mapping[str, str] = os.environ
) -> Rendezvous | None:
    """Return the rendezvous: the store of torchrun's agent, or without one MASTER_PORT, which rank zero opens."""
    if environment.size == 1:
        return None
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return Fixed(host, int(port), ("MASTER_ADDR", "MASTER_PORT"))

    def call(*text: str) -> str | None:
        code, output = server.call(
            "ddpexp.launch.rendezvous.torch_store:main", [json.dumps([host, int(port), key, seconds, *text])]
        )
        if code:
            raise AbsentError(
                f"torchrun's store at {host}:{port} cannot be used: {output.strip().splitlines()[-1:] or code}."
            )
        return next((line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)), None)

    return StoreRendezvous(publish=call, ask=call, local=environment.local_world_size == environment.size)
