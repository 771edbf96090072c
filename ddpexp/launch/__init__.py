"""Start and supervise the workers of one job: the types that launchers and jobs share. Knows nothing of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from ddpexp.errors import Failure, RefusedError
from ddpexp.settings.trainer import Timeout


class NotPortableError(RefusedError):
    """The launcher starts further commands, and they cannot run this kind of job."""


@dataclass(frozen=True)
class WorkerRequest:
    """The workers that the user requested: the `trainer.` keys of the same names."""

    nodes: Literal["auto"] | int | str = "auto"  # a string is a range, such as 1:4
    gpus: Literal["auto"] | int = "auto"
    device: str = "auto"
    backend: str = "auto"
    threads: Literal["auto"] | int = "auto"
    grace_seconds: float = 25.0  # from a stop signal to SIGKILL
    timeout: Timeout = field(default_factory=Timeout)

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the greatest number of machines; both are 1 for `auto`."""
        low, _, high = ("1" if self.nodes == "auto" else str(self.nodes)).partition(":")
        return int(low), int(high or low)


@dataclass(frozen=True)
class Layout:
    """The resolved number and kind of workers: the same for all commands of a job."""

    nodes: int
    world_size: int
    device: str  # cpu or cuda
    backend: str  # gloo, nccl or mpi
    threads: int  # CPU threads per worker


@dataclass(frozen=True)
class Participants:
    """The commands that run a job together, with one entry for each."""

    hosts: Sequence[str] = ()
    owners: Sequence[str] = ()  # what started the commands and may restart them (a Slurm job, an agent), if known
    restarted: bool | None = None  # whether it has restarted them; None: not known

    @property
    def earlier(self) -> Sequence[str]:
        """Return the owners under which an earlier start of this job may have run."""
        return () if self.restarted is False else self.owners


@dataclass(frozen=True)
class Done:
    """The launcher has returned without an error."""


@dataclass(frozen=True)
class Failed:
    """The job failed, or was refused."""

    failure: Failure
    workers_live: bool = False  # this command exits before its workers: what they use is not released


@dataclass(frozen=True)
class Interrupted:
    """A signal ended the job."""

    step: int | None = None  # the last step that all workers have done, where that is known
    saved: bool = False  # everything up to it is saved


Outcome: TypeAlias = Done | Failed | Interrupted


@dataclass(frozen=True)
class Work:
    """What the workers of one command do: every process calls `entry` with `arguments`."""

    entry: str  # module:function
    arguments: Sequence[str]
    logs: Path | None = None  # the folder for each rank's output; None: unnamed files that end with the job
    shared: Mapping[str, Any] = field(default_factory=dict)  # plain values that the other commands need to enter
    requests: Path | None = None  # the folder for what other commands ask of the job; None: they cannot


class Lifecycle:
    """How a job begins and ends in each of its commands: the leading one begins it, the others enter it."""

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Set up the job once. Called by the leading command, after the rendezvous and before any worker starts."""
        raise NotImplementedError

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> Work:
        """Enter the job that the leading command has begun. Called by all other commands."""
        raise NotImplementedError

    def end(self, outcome: Outcome | None) -> str:
        """Record how the job ended, release what this command holds of it, and return a text on what is left.

        Called at the end of every command; with None where another command records the end. A launcher that ends a
        job whose workers are elsewhere calls it before.
        """
        return "nothing was started"


class Portable(Protocol):
    """What launchers that start further commands, elsewhere or later, need of a job."""

    @property
    def needs(self) -> object:
        """What `prepare` provides; of several jobs with the same needs only one prepares."""

    def foresee(self) -> object:
        """Check what a start would find, without changing anything.

        Raises:
            RefusedError: a start would be refused. FinishedError: there is nothing left to do.
        """

    def prepare(self) -> None:
        """Make the data available where this command runs."""

    def create(self) -> Path:
        """Create the folder from which another command can join with `ddpexp member FOLDER`; return its real path.

        Its result says that the job is submitted, since the job may begin as soon as it is. A new folder is removed if
        the job is refused before `submitted` is called.
        """

    def submitted(self, **facts: Any) -> None:
        """Add facts, such as the id of the job at its scheduler, to the result, unless the job has already begun."""

    def withdraw(self, others: Sequence[Path]) -> None:
        """Remove the folder of a submitted job that was refused, if `create` has made it, with `others` in it."""

    def describe(self) -> dict[str, Any]:
        """Return, as plain values, what `ddpexp member FILE` needs to join."""


@dataclass(frozen=True)
class Job:
    """What a launcher has to know of a job, which may run from several commands: one per node, or one per rank.

    A launcher that settles more of it replaces the job.
    """

    lifecycle: Lifecycle
    request: WorkerRequest = field(default_factory=WorkerRequest)
    name: str = "ddpexp"  # shown in a scheduler's queue
    identity: Mapping[str, Any] = field(default_factory=dict)  # must be equal in all commands of the job
    folder: Path = Path()  # visible to all hosts, where the commands of several hosts find one another
    run_dir: Path | None = None  # which `portable.create` returns, where it is known before
    # Refuses layouts that the job cannot run on: those of a range of machines, or a single one. Called by every
    # command before anything is opened or written.
    check: Callable[[Sequence[Layout]], None] = lambda layouts: None
    # Refuses while another start uses the folder. Called by the leading command after the rendezvous.
    check_vacant: Callable[[], None] = lambda: None
    portable: Portable | None = None  # for launchers that start further commands; None: they cannot run it

    def require_portable(self) -> Portable:
        """Return what lets other commands run the job.

        Raises:
            NotPortableError: they cannot run it.
        """
        if self.portable is None:
            raise NotPortableError(
                "this launcher starts further commands, which is supported only for training",
                suggestion="Use launcher=spawn, or start the ranks yourself (srun or torchrun) with launcher=slurm or "
                "launcher=torchrun-env.",
            )
        return self.portable
