"""What a launcher is: the contract with those of ours and with those that other packages add."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ddpexp.launch import Job

if TYPE_CHECKING:
    from ddpexp.launch.workers.client import Server


@runtime_checkable
class Launcher(Protocol):
    """Chosen by `launcher=`: runs a job in as many processes as it asks for."""

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the workers, watch them and return the exit code; `server` is a fork server started early, if there is one.

        Raises:
            RefusedError: the job cannot run here. WorkerError: a worker failed; the first genuine cause, the others are
            only named. StoppedError: a signal to this process ended the run.
        """
        ...


@runtime_checkable
class Starter(Protocol):
    """A launcher that starts further commands (`ddpexp member ...`), each of which joins the job with this call."""

    def member(self, job: Job, server: Server | None = None) -> int:
        """Do this command's part of the job, like `Launcher.launch`."""
        ...


@runtime_checkable
class StartsExternally(Protocol):
    """A launcher whose ranks somebody else starts, such as torchrun, and has to start again."""

    @property
    def ranks_started_externally(self) -> bool:
        """Tell whether it is so here."""
        ...

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return what starts the ranks again when ddpexp's own words follow it, and where that is typed; `argv` is this command."""
        ...


@runtime_checkable
class Submitter(Protocol):
    """A launcher that hands jobs to a scheduler, many at once, and need not wait for them."""

    @property
    def submits(self) -> bool:
        """Tell whether it does so here: elsewhere, such as inside an allocation, `launch` runs a job."""
        ...

    @property
    def wait(self) -> bool:
        """Tell whether the command is asked to stay until the jobs have ended."""
        ...

    @property
    def dry_run(self) -> bool:
        """Tell whether `submit` is asked to print what it would do, and to write nothing."""
        ...

    def submit(self, jobs: Sequence[tuple[Launcher, Job]], folder: Path, submitted: Callable[[int, str], None]) -> None:
        """Submit jobs, each with its own launcher of this kind; `folder` is for the scripts and their logs.

        Calls `submitted` with a job's place in `jobs` and its id as soon as it has one; the job has noted it by then, or soon.
        A job that is finished is left out.

        Raises:
            RefusedError: a job cannot be submitted; of those that have no id each that was made says why it failed.
            StoppedError: a signal to this process; those that have no id are interrupted.
        """
        ...

    def follow(self, job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
        """Wait until all have ended; call `ended` once for each with its place in `job_ids`, its last state and exit code.

        The exit code is 0 alone for what ended well, and for what the scheduler has FORGOTTEN: the run directory tells.

        Raises:
            StoppedError: a signal to this process, which leaves the jobs alone and says so.
        """
        ...


def restate_on_resume(launcher: Launcher) -> list[str]:
    """Return, as they are typed, the settings of a launcher that run code or connect to others, and that are set.

    A launcher names them as `restate_on_resume`: they never count on the word of a run directory.
    """
    names: Sequence[str] = getattr(launcher, "typed_again", ())
    return [f"launcher.{name}={json.dumps(value)}" for name in names if (value := getattr(launcher, name))]
