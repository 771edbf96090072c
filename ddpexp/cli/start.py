"""What a training and the verbs that start jobs share: the experiment of some overrides, and the launch of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.config.plugins import launcher_name
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.schema import Experiment
from ddpexp.config.sweeps import Swept
from ddpexp.errors import RefusedError
from ddpexp.launch import Job, WorkerRequest
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.rendezvous.environment import externally_started, ignored_variables
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.system.terminal import print_message


def sweep(swept: Swept, server: Server | None) -> int:
    """Run the jobs of a sweep, and return the exit code."""
    from ddpexp.sweep.run import run_sweep  # late: most commands train one run

    check_runs_once("run the whole sweep")
    outcome.stop_on_signals()
    return run_sweep(swept, server)


def compose_experiment(overrides: Sequence[str]) -> tuple[Experiment, ResolvedConfig]:
    """Compose the experiment that the overrides of a verb describe, as a training with them would.

    Raises:
        RefusedError: a training would be refused.
    """
    composed = compose(list(overrides))
    experiment = parse(composed.values)
    print_warnings(composed)
    return experiment, composed


def print_warnings(composed: ResolvedConfig) -> None:
    """Print the warnings: one of several commands does."""
    for warning in composed.warnings if os.environ.get("RANK", "0") == "0" else ():
        print_message(f"ddpexp: warning: {warning}")


def launch(launcher: Launcher, job: Job, server: Server | None) -> int:
    """Run a job and return its exit code.

    Raises:
        RefusedError: as `check_started_once`, or the job is refused. WorkerError: a worker failed.
    """
    check_started_once(launcher, job.request)
    return outcome.launch(launcher, job, server)


def check_started_once(launcher: Launcher, request: WorkerRequest, environ: Mapping[str, str] = os.environ) -> None:
    """Check that nothing has started several of this command where each of them would run the whole job.

    Raises:
        RefusedError: torchrun, mpirun or srun has, and the launcher is the one for a command that stands alone.
    """
    if not launcher.stands_alone or request.nodes not in ("auto", 1):
        return
    if (started := externally_started(environ)) is not None:
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
