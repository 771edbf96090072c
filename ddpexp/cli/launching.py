"""Launch the job of a verb, unless something else has started several of this command."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddpexp.errors import RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.rendezvous.environment import externally_started, ignored_variables
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.system.terminal import print_message


def launch(launcher: Launcher, job: Job, server: Server | None) -> int:
    """Run a job and return its exit code.

    Raises:
        RefusedError: as `check_started_once`, or the job is refused. WorkerError: a worker failed.
    """
    check_started_once(launcher, job)
    return outcome.launch(launcher, job, server)


def check_started_once(launcher: Launcher, job: Job, environ: Mapping[str, str] = os.environ) -> None:
    """Check that nothing has started several of this command where each of them would run the whole job.

    Raises:
        RefusedError: torchrun, mpirun or srun has, and the launcher is the one for a command that stands alone.
    """
    if not launcher.stands_alone or job.request.nodes not in ("auto", 1):
        return
    if (started := externally_started(environ)) is not None:
        from ddpexp.config.plugins import launcher_name  # late: it imports yaml, and every command starts here

        starter, count, right = started
        raise RefusedError(
            f"{starter} has started {count} of these commands, and launcher={launcher_name(type(launcher))} would run "
            "each alone",
            suggestion=f"Use launcher={right}.",
        )
    if (warning := ignored_variables(environ)) is not None:
        print_message(f"ddpexp: warning: {warning}")


def check_runs_once(what: str) -> None:
    """Check that nothing has started several of a command that does all of its work by itself."""
    if (started := externally_started()) is not None:
        starter, count, _ = started
        raise RefusedError(
            f"{starter} has started {count} of these commands, and each would {what}",
            suggestion=f"Type the command without {starter}.",
        )
