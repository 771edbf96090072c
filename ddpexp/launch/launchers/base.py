"""The interface of a launcher, for ddpexp's own and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout, WorkerRequest
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.system.job_schedulers.base import JobScheduler
from ddpexp.system.job_schedulers.slurm import SLURM

if TYPE_CHECKING:
    from ddpexp.launch.workers.client import Server


@dataclass(frozen=True)
class ResourceRequest:
    """What a launcher requests from a job scheduler for a job."""

    scheduler: JobScheduler
    lines: tuple[str, ...]  # of the job's script
    summary: str  # the same in one line
    layout: Layout | None  # that it implies; None where it depends on the GPUs of the nodes
    cores: int | None  # of a node; None: the scheduler's default


class Launcher:
    """Base of all launchers, chosen by `launcher=`: runs a job in as many processes as it requests.

    A launcher is a frozen dataclass that derives from this class: its fields are the keys of its config section, and
    it implements `launch`. The other attributes and methods declare its properties to the rest of ddpexp.
    """

    job_scheduler: ClassVar[JobScheduler] = SLURM  # whose job ids a `Submitter` reports
    provides_mpi: ClassVar[bool] = False  # its ranks are started by mpirun, so trainer.backend=mpi can work
    accepts_range: ClassVar[bool] = False  # of machines, such as trainer.nodes=1:4
    takes_slots: ClassVar[bool] = False  # its workers run on this machine, so the jobs of a sweep share its slots
    stands_alone: ClassVar[bool] = False  # one command on a machine starts all workers there, and no other program
    # Fields that run code or connect to others: their values in a run directory are not trusted.
    restate_on_resume: ClassVar[Sequence[str]] = ()

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the workers, supervise them and return the exit code.

        `server` is a fork server that was started early, if there is one.

        Raises:
            RefusedError: the job cannot run here. WorkerError: a worker failed; it has the first genuine cause, the
            other ranks are only named. StoppedError: a signal to this process ended the run.
        """
        raise NotImplementedError

    def check(self, experiment: ExperimentSettings) -> None:
        """Check the options against the rest of the configuration; a subclass calls this method of its base too.

        Raises:
            RefusedError: they contradict each other; names the keys.
        """
        trainer = experiment.trainer
        if trainer.backend == "mpi" and not self.provides_mpi:
            raise RefusedError(
                "needs launcher=mpi, because only mpirun connects the ranks for it",
                key="trainer.backend",
                value="mpi",
                suggestion="Use trainer.backend=auto.",
            )
        if not isinstance(trainer.nodes, str) or trainer.nodes == "auto":
            return
        low, _, high = trainer.nodes.partition(":")
        if not self.accepts_range:
            raise RefusedError(
                "is a range, which only launcher=elastic supports",
                key="trainer.nodes",
                value=trainer.nodes,
                suggestion=f"Use launcher=elastic, or trainer.nodes={high}.",
            )
        if int(low) > int(high):
            raise RefusedError(
                "is not a valid range, in which the smaller number of machines comes first",
                key="trainer.nodes",
                value=trainer.nodes,
                suggestion=f"Use trainer.nodes={high}:{low}.",
            )

    def adapt(self, request: WorkerRequest) -> WorkerRequest:
        """Return the request for workers with what this launcher settles itself.

        Raises:
            RefusedError: it cannot start them.
        """
        return request

    @property
    def forks_here(self) -> bool:
        """Return whether its workers are forked from a warm fork server on this machine."""
        return False

    @property
    def ranks_started_externally(self) -> bool:
        """Return whether another program, such as torchrun, starts the ranks, and has to start them on a resume."""
        return False

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return the command line that starts the ranks, without ddpexp's arguments, and a note on where to run it.

        `argv` is this command's own. Called where `ranks_started_externally`.
        """
        raise NotImplementedError

    def arguments_of_this_machine(self) -> list[str]:
        """Return the overrides that differ between machines, such as `launcher.node_rank=1`."""
        return []

    def arguments_for_allocation(self, layout: Layout) -> list[str]:
        """Return overrides for what a job got from its allocation, for another one."""
        return []

    def resource_request(self, job: Job, nodes: int) -> ResourceRequest | None:
        """Return what would be requested from a job scheduler to run a job; None if it runs without one.

        Raises:
            RefusedError: the scheduler would reject it.
        """
        return None


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
        """Return whether jobs are submitted here; elsewhere, such as inside an allocation, `launch` runs a job."""
        ...

    @property
    def wait(self) -> bool:
        """Return whether the command waits until the jobs have ended."""
        ...

    @property
    def dry_run(self) -> bool:
        """Return whether `submit` only prints what it would do, and writes nothing."""
        ...

    def submit(self, jobs: Sequence[tuple[Launcher, Job]], folder: Path, submitted: Callable[[int, str], None]) -> None:
        """Submit jobs, each with its own launcher of this class; `folder` is for the scripts and their logs.

        Calls `submitted` with a job's index in `jobs` and its id as soon as it has one; the job records it at about
        the same time. Finished jobs are skipped.

        Raises:
            RefusedError: a job cannot be submitted; jobs that were created but have no id are recorded as failed.
            StoppedError: a signal to this process; jobs without an id are recorded as interrupted.
        """
        ...

    def follow(self, job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
        """Wait until all jobs have ended; call `ended` for each with its index in `job_ids`, its state and exit code.

        The exit code is 0 only for jobs that ended well, and for those that the scheduler has FORGOTTEN: their run
        directories have the result.

        Raises:
            StoppedError: a signal to this process; the jobs keep running, which is printed.
        """
        ...
