"""What a launcher is: the contract with those of ours and with those that other packages add."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from ddpexp.launch import Job, Layout

if TYPE_CHECKING:
    from ddpexp.launch.workers.client import Server


class Launcher:
    """Chosen by `launcher=`: runs a job in as many processes as it requests.

    A launcher is a frozen dataclass that derives from this class: its fields are the keys of its section, and it
    implements `launch`. What it is otherwise, other rooms learn from the attributes and methods here.
    """

    provides_mpi: ClassVar[bool] = False  # what starts its ranks connects them for trainer.backend=mpi, too
    restate_on_resume: ClassVar[
        Sequence[str]
    ] = ()  # fields that run code or connect to others: a run directory's are not trusted

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the workers, watch them and return the exit code.

        `server` is a fork server started early, if there is one.

        Raises:
            RefusedError: the job cannot run here. WorkerError: a worker failed; the first genuine cause, the others are
            only named. StoppedError: a signal to this process ended the run.
        """
        raise NotImplementedError

    @property
    def forks_here(self) -> bool:
        """Return whether its workers are forked from a warm server on this machine."""
        return False

    @property
    def ranks_started_externally(self) -> bool:
        """Return whether somebody else, such as torchrun, starts the ranks here and has to start them again."""
        return False

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return what starts the ranks again when ddpexp's own words follow it, and where that is typed.

        `argv` is this command.

        Called where `ranks_started_externally`.
        """
        raise NotImplementedError

    def words_of_this_machine(self) -> list[str]:
        """Return the overrides that are typed otherwise on every machine, such as `launcher.node_rank=1`."""
        return []

    def words_of_allocation(self, job: Job, layout: Layout) -> list[str]:
        """Return the overrides that request what a job has got from an allocation, where none are typed."""
        return []

    def restated_words(self) -> list[str]:
        """Return the overrides that a user must type again to resume: see `restate_on_resume`."""
        return [
            f"launcher.{name}={json.dumps(value)}" for name in self.restate_on_resume if (value := getattr(self, name))
        ]


@runtime_checkable
class Starter(Protocol):
    """A launcher that starts further commands (`ddpexp member ...`), each of which joins the job with this call."""

    def member(self, job: Job, server: Server | None = None) -> int:
        """Do this command's part of the job, like `Launcher.launch`."""
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

        Calls `submitted` with a job's place in `jobs` and its id as soon as it has one; the job has noted it by then,
        or soon. A job that is finished is left out.

        Raises:
            RefusedError: a job cannot be submitted; of those that have no id each that was made says why it failed.
            StoppedError: a signal to this process; those that have no id are interrupted.
        """
        ...

    def follow(self, job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
        """Wait until all have ended; call `ended` once for each with its place in `job_ids`, its last state.

        And exit code.

        The exit code is 0 alone for what ended well, and for what the scheduler has FORGOTTEN: the run directory tells.

        Raises:
            StoppedError: a signal to this process, which leaves the jobs alone and says so.
        """
        ...
